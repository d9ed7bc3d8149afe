// See inputs.h. Contents come from a hash of (seed, tensor, request, position, channel), so that they do not depend on the batch.
#include "conformance/short_conv/inputs.h"

#include <cmath>

#include "conformance/case_random.h"
#include "core/float_types.h"

namespace imbrex {
namespace {

enum ConvSequence : uint64_t { kRowB, kRowC, kRowX, kWeight, kConvBias };

// The factor of B, and that of x, of a token; in the plain form x has both.
double gain_of(const ShortConvCase& c, int64_t position) {
  switch (c.values) {
    case ShortConvValues::plain: return 1;
    case ShortConvValues::steep: return std::exp2(double(position * 5 % 13 - 6));
    case ShortConvValues::tiny: return c.spec.dtype == DType::f16 ? 0x1p-9 : 0x1p-65;  // products are below 2^-14 and 2^-126
    case ShortConvValues::large: return position % 5 == 3 ? 400 : 1;
  }
  return 1;
}

// The rows of a request's token: B, C and x, or x alone, from `at` on.
void fill_token(const ShortConvCase& c, uint64_t request_seed, int64_t position, HostTensor& t, int64_t at) {
  const bool gated = c.spec.form == ShortConvForm::gated;
  const double gain = gated ? gain_of(c, position) : gain_of(c, position) * gain_of(c, position);
  std::vector<double> values(size_t(c.spec.dim), 0.);
  for (const ConvSequence part : {kRowB, kRowC, kRowX}) {
    if (!gated && part != kRowX) continue;
    const uint64_t key = splitmix(splitmix(request_seed ^ part) + uint64_t(position));
    for (size_t d = 0; d < values.size(); ++d) values[d] = (part == kRowC ? 1 : gain) * normal(splitmix(key + d));
    t.set_row(gated ? at + int64_t(part) * c.spec.dim : at, values);
  }
}

HostTensor parameters(const ShortConvCase& c, ConvSequence sequence, std::vector<int64_t> sizes) {
  HostTensor t = HostTensor::make(c.spec.dtype, std::move(sizes));
  const double gain = sequence == kConvBias && c.values == ShortConvValues::tiny ? gain_of(c, 0) * gain_of(c, 0) : 1;
  for (int64_t i = 0; i < t.num_elements(); ++i) t.set(i, gain * normal(splitmix(splitmix(c.seed * 0x10001 + sequence) + uint64_t(i))));
  return t;
}

}  // namespace

int ShortConvCase::num_tokens() const { return imbrex::num_tokens(requests); }

ShortConvCaseInputs::Rows ShortConvCaseInputs::past_rows(size_t request) const {
  const ShortConvCaseRequest& r = requests[request];
  const int first = r.accepted * (spec.tree_drafts ? spec.width - 1 : 1);
  return r.context_len == 0 ? Rows{0, 0} : Rows{first, first + spec.width - 1};
}

ShortConvCaseInputs::Rows ShortConvCaseInputs::written_rows(size_t request) const {
  const ShortConvCaseRequest& r = requests[request];
  return {0, !r.writes_state() ? 0 : spec.width - 1 + r.drafts * (spec.tree_drafts ? spec.width - 1 : 1)};
}

ShortConvCaseInputs make_inputs(const ShortConvCase& c) {
  const ShortConvSpec& spec = c.spec;
  const int64_t dim = spec.dim, before = spec.width - 1;
  ShortConvCaseInputs in{.spec = spec,
                         .requests = c.requests,
                         .input = HostTensor::make(spec.dtype, {c.num_tokens(), spec.input_channels()}),
                         .weight = parameters(c, kWeight, {dim, spec.width}),
                         .bias = {},
                         .state = HostTensor::make(spec.dtype, {int64_t(c.requests.size()), spec.state_rows(), dim})};
  if (spec.bias) in.bias = parameters(c, kConvBias, {dim});
  HostTensor gone = HostTensor::make(spec.dtype, {spec.input_channels()});
  int64_t token = 0;
  for (size_t r = 0; r < c.requests.size(); ++r) {
    const ShortConvCaseRequest& request = c.requests[r];
    const uint64_t seed = splitmix(c.seed * 0x10001 + uint64_t(request.id)) << 3;  // room for the number of a sequence
    for (int t = 0; t < request.q_len; ++t, ++token) fill_token(c, seed, request.context_len + t, in.input, token * spec.input_channels());
    const ShortConvCaseInputs::Rows rows = in.past_rows(r);
    for (int row = rows.begin; row < rows.end; ++row) {
      const int64_t position = request.context_len - before + row - rows.begin;
      if (position < 0) continue;
      fill_token(c, seed, position, gone, 0);
      for (int64_t d = 0; d < dim; ++d) {
        const double h = spec.form == ShortConvForm::gated ? gone.get(d) * gone.get(2 * dim + d) : gone.get(d);
        in.state.set((int64_t(r) * spec.state_rows() + row) * dim + d, h);
      }
    }
  }
  return in;
}

}  // namespace imbrex
