// See convolved.h.
#include "conformance/recurrent/convolved.h"

#include <algorithm>
#include <cmath>

#include "conformance/precision.h"
#include "conformance/short_conv/judge.h"
#include "core/float_types.h"

namespace imbrex {
namespace {

double nearest(DType dtype, double x) {
  char element[sizeof(float)];
  store_from_double(element, dtype, 0, x);
  return load_as_double(element, dtype, 0);
}

}  // namespace

ConvolvedRows convolved_rows(const RecurrentCaseInputs& in) {
  const RecurrentSpec& spec = in.spec;
  const ShortConvExpected exact = expected_outputs(in.conv());
  const Precision precision = precision_of(spec.dtype);
  const int64_t tokens = in.input.sizes[0], channels = spec.conv_channels();
  ConvolvedRows rows;
  int64_t first = 0;
  const auto take = [&](HostTensor& t, HostTensor& off, int64_t heads, int64_t dim) {
    t = off = HostTensor::make(DType::f32, {tokens, heads, dim});
    for (int64_t token = 0; token < tokens; ++token)
      for (int64_t i = 0; i < heads * dim; ++i) {
        const auto at = size_t(token * channels + first + i);
        const double y = exact.out[at], rounded = nearest(spec.dtype, y);
        // The bound has the rounding of the output, which is taken off again: what is left is that of the sum.
        const double error = std::max(exact.allowed[at] - precision.rounding * std::abs(y) - precision.smallest / 2, 0.);
        t.set(token * heads * dim + i, rounded);
        off.set(token * heads * dim + i,
                std::max(std::abs(nearest(spec.dtype, y + error) - rounded), std::abs(nearest(spec.dtype, y - error) - rounded)));
      }
    first += heads * dim;
  };
  const bool values_first = spec.conv == RecurrentConv::vkq;
  if (values_first) take(rows.v, rows.v_off, spec.num_v_heads, spec.head_dim_v);
  if (values_first) take(rows.k, rows.k_off, spec.num_k_heads, spec.head_dim_k);
  take(rows.q, rows.q_off, spec.num_k_heads, spec.head_dim_k);
  if (!values_first) take(rows.k, rows.k_off, spec.num_k_heads, spec.head_dim_k);
  if (!values_first) take(rows.v, rows.v_off, spec.num_v_heads, spec.head_dim_v);
  return rows;
}

}  // namespace imbrex
