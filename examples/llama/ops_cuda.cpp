// Ops on an NVIDIA GPU: products by cuBLAS, the rest by kernels.cu, all in the order of the stream that attention is in too.
#include <vector>

#include "check.h"
#include "cuda_libraries.h"
#include "ops.h"

namespace llama {
namespace {

using imbrex::DType;
using imbrex::TensorView;

constexpr char kKernels[] =
#include "kernels.inc"  // kernels.cu as a string, by CMakeLists.txt
    ;

constexpr unsigned kThreads = 256;

// The device's primary context, which imbrex uses too, current in this thread.
class PrimaryContext {
 public:
  explicit PrimaryContext(int index) {
    cuda::check_driver(cuda::driver().cuDeviceGet(&device_, index), "get the device");
    cuda::Context context = nullptr;
    cuda::check_driver(cuda::driver().cuDevicePrimaryCtxRetain(&context, device_), "retain the device's context");
    cuda::driver().cuCtxSetCurrent(context);
  }
  ~PrimaryContext() { cuda::driver().cuDevicePrimaryCtxRelease_v2(device_); }
  PrimaryContext(const PrimaryContext&) = delete;
  PrimaryContext& operator=(const PrimaryContext&) = delete;

 private:
  int device_ = 0;
};

std::vector<char> compile(int sm, DType dtype) {
  const cuda::Nvrtc& nvrtc = cuda::nvrtc();
  cuda::Program program = nullptr;
  check(nvrtc.nvrtcCreateProgram(&program, kKernels, "kernels.cu", 0, nullptr, nullptr) == 0, "NVRTC cannot make a program");
  const std::string arch = "--gpu-architecture=sm_" + std::to_string(sm);
  const char* const options[] = {arch.c_str(), dtype == DType::f32 ? "-DElement=float" : "-DElement=bf16", "--std=c++17"};
  const int result = nvrtc.nvrtcCompileProgram(program, 3, options);
  size_t size = 0;
  if (result != 0) {
    nvrtc.nvrtcGetProgramLogSize(program, &size);
    std::string log(size, '\0');
    nvrtc.nvrtcGetProgramLog(program, log.data());
    fail("NVRTC refused kernels.cu with ", arch, ", error ", result, ":\n", log.c_str());
  }
  nvrtc.nvrtcGetCUBINSize(program, &size);
  std::vector<char> cubin(size);
  nvrtc.nvrtcGetCUBIN(program, cubin.data());
  nvrtc.nvrtcDestroyProgram(&program);
  return cubin;
}

class CudaOps final : public Ops {
 public:
  CudaOps(const imbrex::DeviceInfo& device, DType dtype, const imbrex::DeviceStream& stream)
      : context_(device.device.index), stream_(static_cast<cuda::CuStream>(stream.get())) {
    const std::vector<char> cubin = compile(device.sm, dtype);
    cuda::check_driver(cuda::driver().cuModuleLoadData(&module_, cubin.data()), "load the kernels");
    check_blas(cuda::cublas().cublasCreate_v2(&blas_), "start cuBLAS");
    check_blas(cuda::cublas().cublasSetStream_v2(blas_, stream_), "give cuBLAS the stream");
  }
  ~CudaOps() override {
    if (blas_ != nullptr) cuda::cublas().cublasDestroy_v2(blas_);
    if (module_ != nullptr) cuda::driver().cuModuleUnload(module_);
  }
  CudaOps(const CudaOps&) = delete;
  CudaOps& operator=(const CudaOps&) = delete;

  // cuBLAS counts columns first: to it x is [in, rows], the weight [in, out] and y [out, rows].
  void linear(const TensorView& x, const Linear& linear, const TensorView& y) override {
    const TensorView &w = linear.weight.view, &bias = linear.bias.view;
    const int rows = int(x.size(0)), in = int(w.size(1)), out = int(w.size(0));
    const float one = 1, zero = 0;
    const auto type = [](const TensorView& t) { return t.dtype == DType::f32 ? cuda::kR32F : cuda::kR16BF; };
    check_blas(cuda::cublas().cublasGemmEx(blas_, cuda::kOpT, cuda::kOpN, out, rows, in, &one, w.data, type(w), in, x.data, type(x), in,
                                           &zero, y.data, type(y), out, cuda::kCompute32F, cuda::kGemmDefault),
               "multiply matrices");
    if (!bias.empty()) launch(add_bias_, y.num_elements(), y.data, bias.data, (long long)(y.num_elements()), out);
  }

  void rms_norm(const TensorView& x, const TensorView& weight, float eps, const TensorView& y) override {
    const long long width = weight.size(0), rows = x.num_elements() / width;
    launch(rms_norm_, rows * 32, x.data, weight.data, eps, y.data, rows, int(width));
  }
  void rope(const TensorView& x, const TensorView& rotation) override {
    const long long half = rotation.size(2), pairs = x.size(0) * x.size(1) * half;
    launch(rope_, pairs, x.data, rotation.data, pairs, int(x.size(1)), int(x.size(2)), int(half));
  }
  void silu_mul(const TensorView& gate, const TensorView& up) override {
    launch(silu_mul_, gate.num_elements(), gate.data, up.data, (long long)(gate.num_elements()));
  }
  void add(const TensorView& x, const TensorView& y) override {
    launch(add_, x.num_elements(), x.data, y.data, (long long)(x.num_elements()));
  }
  void add_rows(const TensorView& x, const TensorView& rows, const TensorView& weights, const TensorView& y) override {
    launch(add_rows_, y.num_elements(), x.data, rows.data, weights.data, y.data, (long long)(y.num_elements()), int(x.size(1)));
  }

 private:
  struct Kernel {
    const char* name;
    cuda::Function function = nullptr;
  };

  static void check_blas(int result, const char* what) { check(result == 0, what, ": status ", result, " of cuBLAS"); }

  // At least `threads` of them; the arguments have exactly the types of the kernel's parameters.
  template <class... Arguments>
  void launch(Kernel& kernel, long long threads, Arguments... arguments) {
    if (kernel.function == nullptr)
      cuda::check_driver(cuda::driver().cuModuleGetFunction(&kernel.function, module_, kernel.name), kernel.name);
    void* parameters[] = {&arguments...};
    cuda::check_driver(cuda::driver().cuLaunchKernel(kernel.function, unsigned((threads + kThreads - 1) / kThreads), 1, 1, kThreads, 1, 1,
                                                     0, stream_, parameters, nullptr),
                       kernel.name);
  }

  PrimaryContext context_;
  cuda::CuStream stream_;
  cuda::Module module_ = nullptr;
  cuda::Blas blas_ = nullptr;
  Kernel rms_norm_{"rms_norm"}, rope_{"rope"}, silu_mul_{"silu_mul"}, add_{"add"}, add_bias_{"add_bias"}, add_rows_{"add_rows"};
};

}  // namespace

std::unique_ptr<Ops> make_cuda_ops(const imbrex::DeviceInfo& device, DType dtype, const imbrex::DeviceStream& stream) {
  return std::make_unique<CudaOps>(device, dtype, stream);
}

}  // namespace llama
