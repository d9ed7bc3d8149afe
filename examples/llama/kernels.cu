// What the model does between products of matrices on a GPU, in Element: float or bf16. Compiled by NVRTC without any header; ops_cuda.cpp
// launches it. Rows of a tensor go to warps, elements to threads.

struct bf16 {
  unsigned short bits;
};

__device__ float to_float(float x) { return x; }
__device__ float to_float(bf16 x) { return __uint_as_float(unsigned(x.bits) << 16); }
__device__ void from_float(float x, float& to) { to = x; }
__device__ void from_float(float x, bf16& to) {  // to nearest even
  const unsigned bits = __float_as_uint(x);
  const bool nan = (bits & 0x7fffffff) > 0x7f800000;
  to.bits = (unsigned short)(nan ? bits >> 16 | 0x40 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

__device__ long long thread_index() { return (long long)(blockIdx.x) * blockDim.x + threadIdx.x; }

// A warp for each row of x, which may be y.
extern "C" __global__ void rms_norm(const Element* x, const Element* weight, float eps, Element* y, long long rows, int width) {
  const long long row = thread_index() / 32;
  const int lane = int(threadIdx.x % 32);
  if (row >= rows) return;
  x += row * width, y += row * width;
  float sum = 0;
  for (int i = lane; i < width; i += 32) sum += to_float(x[i]) * to_float(x[i]);
  for (int distance = 16; distance > 0; distance /= 2) sum += __shfl_xor_sync(0xffffffff, sum, distance);
  const float factor = 1.f / sqrtf(sum / float(width) + eps);
  for (int i = lane; i < width; i += 32) from_float(to_float(x[i]) * factor * to_float(weight[i]), y[i]);
}

// A thread for each pair among the last 2 * half elements of a head; rotation [tokens, 2, half].
extern "C" __global__ void rope(Element* x, const float* rotation, long long pairs, int heads, int dim, int half) {
  const long long index = thread_index();
  if (index >= pairs) return;
  const long long row = index / half, token = row / heads;
  const int i = int(index % half);
  const float cosine = rotation[token * 2 * half + i], sine = rotation[token * 2 * half + half + i];
  x += (row + 1) * dim - 2 * half;
  Element &low = x[i], &high = x[half + i];
  const float a = to_float(low), b = to_float(high);
  from_float(a * cosine - b * sine, low);
  from_float(b * cosine + a * sine, high);
}

extern "C" __global__ void silu_mul(Element* gate, const Element* up, long long count) {
  const long long i = thread_index();
  if (i >= count) return;
  const float g = to_float(gate[i]);
  from_float(g / (1.f + expf(-g)) * to_float(up[i]), gate[i]);
}

extern "C" __global__ void add(Element* x, const Element* y, long long count) {
  const long long i = thread_index();
  if (i < count) from_float(to_float(x[i]) + to_float(y[i]), x[i]);
}

// x[rows[i], :] += weights[i] * y[i, :]
extern "C" __global__ void add_rows(Element* x, const int* rows, const float* weights, const Element* y, long long count, int width) {
  const long long i = thread_index();
  if (i >= count) return;
  Element& to = x[rows[i / width] * (long long)(width) + i % width];
  from_float(to_float(to) + weights[i / width] * to_float(y[i]), to);
}

// x[i, :] += bias
extern "C" __global__ void add_bias(Element* x, const Element* bias, long long count, int width) {
  const long long i = thread_index();
  if (i < count) from_float(to_float(x[i]) + to_float(bias[i % width]), x[i]);
}
