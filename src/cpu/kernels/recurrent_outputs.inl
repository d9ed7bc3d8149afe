// The gate and the norm of outputs of recurrent layers, of rows that lie in memory as they were computed. Included after recurrent.inl.
//
// A group's outputs are read twice, for the sum of squares and for the result: the second time they are in the first-level cache. The sum
// is one chain of vectors in the order of the group's heads, whatever lies between these.

namespace imbrex::cpu {
namespace {

inline Floats output_gate(const RecurrentParams& p, Floats z) {
  return p.out_gate == kSiluOutputs ? z * sigmoid_vector(z) : sigmoid_vector(z);
}

// Heads, or many that lie side by side, of a token. kType: of outputs and z.
template <int kType>
struct OutputRows {
  char* out;
  const char *z, *weight;  // null: none
  long out_stride, z_stride, weight_stride;
  int rows, n;

  // Calls visit(output, z, weight, where the output lies, how many numbers there are) for each vector.
  void each(const RecurrentParams& p, const auto& visit) const {
    for (int row = 0; row < rows; ++row) {
      char* const to = out + row * out_stride;
      const char *const gate = z + row * z_stride, *const factor = weight + row * weight_stride;
      for (int i = 0; i < n; i += kLanes) {
        const int count = n - i < kLanes ? n - i : kLanes;
        const long at = i * element_size(kType);
        const Floats g = z == nullptr ? Floats{} : load_vector<kType>(gate + at, count);
        Floats w = {};
        if (weight != nullptr)
          w = p.weight_type == kF32 ? load_vector<kF32>(factor + i * 4l, count) : load_vector<kType>(factor + at, count);
        visit(load_vector<kType>(to + at, count), g, w, to + at, count);
      }
    }
  }
};

template <int kType>
void finish_group(const RecurrentParams& p, const OutputRows<kType>& rows) {
  if (p.out_norm == kNoNorm) {
    rows.each(p, [&](Floats x, Floats z, Floats, char* to, int n) { store_vector<kType>(x * output_gate(p, z), n, to); });
    return;
  }
  const bool gate_first = p.out_norm == kNormAfterGate;
  Floats squares = {};
  rows.each(p, [&](Floats x, Floats z, Floats, char*, int) {
    if (gate_first) x *= output_gate(p, z);
    squares += x * x;
  });
  const float factor = 1.f / __builtin_sqrtf(sum_of(squares) / float(rows.rows * rows.n) + p.norm_eps);
  rows.each(p, [&](Floats x, Floats z, Floats weight, char* to, int n) {
    if (gate_first) x *= output_gate(p, z);
    x = x * factor * weight;
    if (!gate_first && p.out_gate != kNoOutputGate) x *= output_gate(p, z);
    store_vector<kType>(x, n, to);
  });
}

template <int kType>
void finish_outputs_of(const RecurrentParams& p, int token_begin, int token_end, int head_begin, int head_end) {
  const bool normed = p.out_norm != kNoNorm, gated = p.out_gate != kNoOutputGate;
  const long row = p.dim_v * element_size(kType);
  // A gate alone takes all heads as one where they lie side by side.
  const bool flat = !normed && p.out_head_stride == row && p.z_head_stride == row;
  const int heads = normed ? p.norm_heads : head_end - head_begin;
  for (int token = token_begin; token < token_end; ++token)
    for (int head = head_begin; head < head_end; head += heads)
      finish_group(p, OutputRows<kType>{.out = p.out + token * p.out_token_stride + head * p.out_head_stride,
                                        .z = gated ? p.z + token * p.z_token_stride + head * p.z_head_stride : nullptr,
                                        .weight = normed ? p.norm_weight + head * p.weight_stride : nullptr,
                                        .out_stride = p.out_head_stride,
                                        .z_stride = p.z_head_stride,
                                        .weight_stride = p.weight_stride,
                                        .rows = flat ? 1 : heads,
                                        .n = flat ? heads * p.dim_v : p.dim_v});
}

void finish_outputs(const RecurrentParams& p, int token_begin, int token_end, int head_begin, int head_end) {
  switch (p.type) {
    case kF32: return finish_outputs_of<kF32>(p, token_begin, token_end, head_begin, head_end);
    case kF16: return finish_outputs_of<kF16>(p, token_begin, token_end, head_begin, head_end);
    default: return finish_outputs_of<kBf16>(p, token_begin, token_end, head_begin, head_end);
  }
}

}  // namespace
}  // namespace imbrex::cpu
