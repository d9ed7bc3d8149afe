// Partial results merged on a GPU beside merge_partial_results(): types, strides, empty parts; and inside a graph.
#include <cmath>
#include <limits>
#include <random>

#include "core/float_types.h"
#include "cuda/gpu.h"
#include "imbrex/error.h"
#include "imbrex/merge.h"

namespace imbrex::cuda {
namespace {

using DeviceMerge = test::Gpu;

constexpr int64_t kTokens = 37, kHeads = 5;
constexpr int kParts = 3;

struct Problem {
  DType type;
  int64_t dim;
  std::vector<std::vector<char>> outs;
  std::vector<std::vector<float>> logs;

  Problem(DType type, int64_t dim, unsigned seed) : type(type), dim(dim) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    for (int part = 0; part < kParts; ++part) {
      outs.emplace_back(size_t(kTokens * kHeads * dim * size_of(type)));
      logs.emplace_back(size_t(kTokens * kHeads));
      for (int64_t i = 0; i < kTokens * kHeads * dim; ++i) store_from_float(outs.back().data(), type, i, normal(random));
      for (size_t row = 0; row < logs.back().size(); ++row) {
        logs.back()[row] = 3 * normal(random);
        if (random() % 4 != 0) continue;
        logs.back()[row] = (random() % 2 == 0 ? 1 : -1) * std::numeric_limits<float>::infinity();
        for (int64_t d = 0; d < dim; ++d) store_from_float(outs.back().data(), type, int64_t(row) * dim + d, NAN);
      }
    }
  }
  TensorView out(void* data) const { return TensorView::contiguous(data, type, {kTokens, kHeads, dim}); }
  static TensorView lse(void* data) { return TensorView::contiguous(data, DType::f32, {kTokens, kHeads}); }
};

void expect_merged(const Problem& p, const std::vector<char>& out, const std::vector<float>& logs) {
  std::vector<PartialResult> parts;
  for (int i = 0; i < kParts; ++i)
    parts.push_back({p.out(const_cast<char*>(p.outs[size_t(i)].data())), Problem::lse(const_cast<float*>(p.logs[size_t(i)].data()))});
  std::vector<char> expected(out.size());
  std::vector<float> expected_logs(logs.size());
  merge_partial_results(parts, p.out(expected.data()), Problem::lse(expected_logs.data()));
  const double tolerance = p.type == DType::f32 ? 4e-6 : p.type == DType::f16 ? 2e-3 : 1.6e-2;
  for (size_t row = 0; row < logs.size(); ++row) {
    if (std::isinf(expected_logs[row])) {
      ASSERT_EQ(logs[row], expected_logs[row]);
    } else {
      ASSERT_NEAR(logs[row], expected_logs[row], 4e-6 * (1 + std::fabs(expected_logs[row])));
    }
    for (int64_t d = 0; d < p.dim; ++d) {
      const float x = load_as_float(out.data(), p.type, int64_t(row) * p.dim + d);
      const float y = load_as_float(expected.data(), p.type, int64_t(row) * p.dim + d);
      ASSERT_NEAR(x, y, tolerance * (1 + std::fabs(y))) << row << " " << d;
    }
  }
}

TEST_F(DeviceMerge, IsWhatTheHostMakesOfThem) {
  const auto merger = make_partial_merger(device);
  for (const DType type : {DType::f32, DType::bf16, DType::f16})
    for (const int64_t dim : {8, 64, 100, 576}) {
      const Problem p(type, dim, unsigned(dim));
      std::vector<DeviceBuffer> buffers;
      std::vector<PartialResult> parts;
      for (int i = 0; i < kParts; ++i) {
        buffers.push_back(upload(p.outs[size_t(i)]));
        const TensorView out = test::on_device(p.out(nullptr), buffers.back());
        buffers.push_back(upload(p.logs[size_t(i)]));
        parts.push_back({out, test::on_device(Problem::lse(nullptr), buffers.back())});
      }
      merger->merge(parts, parts[1].out, parts[1].lse, stream.get());  // the result lies where a part does
      expect_merged(p, download<char>(buffers[2]), download<float>(buffers[3]));
    }
}

TEST_F(DeviceMerge, IsCapturedAndSeesWhatIsThereThen) {
  const auto of_its_own = open_stream(device);
  const Problem first(DType::bf16, 128, 1), second(DType::bf16, 128, 2);
  std::vector<DeviceBuffer> buffers;
  std::vector<PartialResult> parts;
  for (int i = 0; i < kParts; ++i) {
    buffers.push_back(upload(first.outs[size_t(i)]));
    const TensorView out = test::on_device(first.out(nullptr), buffers.back());
    buffers.push_back(upload(first.logs[size_t(i)]));
    parts.push_back({out, test::on_device(Problem::lse(nullptr), buffers.back())});
  }
  const DeviceBuffer out = upload(first.outs[0]), lse = upload(first.logs[0]);
  const auto merger = make_partial_merger(device);
  const DeviceGraph graph = of_its_own->capture([&] {
    merger->merge(parts, test::on_device(first.out(nullptr), out), test::on_device(Problem::lse(nullptr), lse), of_its_own->get());
  });
  for (const Problem* p : {&first, &second}) {
    for (size_t i = 0; i < size_t(kParts); ++i) {
      of_its_own->upload(buffers[2 * i].as<char>(), p->outs[i].data(), int64_t(p->outs[i].size()));
      of_its_own->upload(buffers[2 * i + 1].as<char>(), p->logs[i].data(), int64_t(p->logs[i].size() * sizeof(float)));
    }
    of_its_own->replay(graph);
    of_its_own->synchronize();
    expect_merged(*p, download<char>(out), download<float>(lse));
  }
}

TEST_F(DeviceMerge, RefusesWhatItCannotMerge) {
  const auto merger = make_partial_merger(device);
  const Problem p(DType::f32, 8, 1);
  const DeviceBuffer out = upload(p.outs[0]), lse = upload(p.logs[0]);
  const PartialResult part{test::on_device(p.out(nullptr), out), test::on_device(Problem::lse(nullptr), lse)};
  const auto code = [&](const std::vector<PartialResult>& parts) {
    try {
      merger->merge(parts, part.out, part.lse, stream.get());
    } catch (const Error& error) {
      return error.code();
    }
    return std::string("nothing thrown");
  };
  EXPECT_EQ(code(std::vector<PartialResult>(49, part)), "merge.parts.many");
  EXPECT_EQ(code({}), "merge.parts.none");
  EXPECT_EQ(code({{p.out(const_cast<char*>(p.outs[0].data())), part.lse}}), "merge.device");
}

}  // namespace
}  // namespace imbrex::cuda
