// The values and structs that cuda/driver/cublaslt.h declares by hand are those of cuBLAS's headers, and the library that a machine has
// opens. Compiled only where the headers exist.
#include "cuda/driver/cublaslt.h"

namespace imbrex::cuda {
#define X(name, value, theirs) constexpr int ours_##name = value;
IMBREX_CUBLASLT_CONSTANTS(X)
#undef X
}  // namespace imbrex::cuda

#include <cublasLt.h>
#include <gtest/gtest.h>

namespace imbrex::cuda {
namespace {

#define X(name, value, theirs) static_assert(ours_##name == int(::theirs), #theirs " has another value");
IMBREX_CUBLASLT_CONSTANTS(X)
#undef X

static_assert(sizeof(cublasLtMatmulAlgo_t) == sizeof(::cublasLtMatmulAlgo_t));
static_assert(sizeof(cublasLtMatmulHeuristicResult_t) == sizeof(::cublasLtMatmulHeuristicResult_t));
static_assert(offsetof(cublasLtMatmulHeuristicResult_t, workspace_bytes) == offsetof(::cublasLtMatmulHeuristicResult_t, workspaceSize));
static_assert(offsetof(cublasLtMatmulHeuristicResult_t, state) == offsetof(::cublasLtMatmulHeuristicResult_t, state));
static_assert(offsetof(cublasLtMatmulHeuristicResult_t, waves) == offsetof(::cublasLtMatmulHeuristicResult_t, wavesCount));

TEST(CublasLtHeaders, TheLibraryBesideThemHasEveryFunction) {
  std::string why;
  const CublasLtApi* const lt = cublaslt(&why);
  ASSERT_NE(lt, nullptr) << why;
  EXPECT_GE(lt->cublasLtGetVersion(), kMinCublasLtVersion);
  EXPECT_NE(lt->cublasLtGetStatusString(kCublasNotSupported), nullptr);
}

}  // namespace
}  // namespace imbrex::cuda
