#pragma once
// What a transformer does beside attention, on one device; the model is written in these. All tensors are contiguous and on that device,
// and all of one type, f32 or bf16, unless said otherwise; sums are f32.
#include <memory>

#include "imbrex/device_stream.h"
#include "weights.h"

namespace llama {

class Ops {
 public:
  virtual ~Ops() = default;
  // y [rows, out] = x [rows, in] weight^T + bias; y may be f32 where x is bf16.
  virtual void linear(const imbrex::TensorView& x, const Linear&, const imbrex::TensorView& y) = 0;
  // y[i] = x[i] / sqrt(mean(x[i]^2) + eps) * weight for rows of x as long as the weight; y may be x.
  virtual void rms_norm(const imbrex::TensorView& x, const imbrex::TensorView& weight, float eps, const imbrex::TensorView& y) = 0;
  // Rotates the last 2 * half elements of every head of x [tokens, heads, dim] in place: the pair (i, i + half) of them by the angle whose
  // cosine and sine are rotation f32 [tokens, 2, half].
  virtual void rope(const imbrex::TensorView& x, const imbrex::TensorView& rotation) = 0;
  virtual void silu_mul(const imbrex::TensorView& gate, const imbrex::TensorView& up) = 0;  // gate = silu(gate) * up
  virtual void add(const imbrex::TensorView& x, const imbrex::TensorView& y) = 0;           // x += y
  // x[rows[i]] += weights[i] * y[i] for rows i32 [n], each of which is named once, weights f32 [n] and y [n, width].
  virtual void add_rows(const imbrex::TensorView& x, const imbrex::TensorView& rows, const imbrex::TensorView& weights,
                        const imbrex::TensorView& y) = 0;
};

std::unique_ptr<Ops> make_cpu_ops(const imbrex::ParallelFor&);
// cuBLAS and a file of kernels (kernels.cu), compiled here by NVRTC for tensors of this type. Both libraries are opened at run time.
std::unique_ptr<Ops> make_cuda_ops(const imbrex::DeviceInfo&, imbrex::DType, const imbrex::DeviceStream&);

}  // namespace llama
