#pragma once
// Arguments for the C ABI, in memory of exactly the size that they claim: the sanitizer finds an access to the first byte beyond it.
#include <algorithm>
#include <cstddef>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "imbrex/imbrex.h"

namespace imbrex::test {

// Random numbers that are the same with every standard library.
class Random {
 public:
  explicit Random(uint64_t seed) : engine_(seed * 0x9e3779b97f4a7c15ull + 1) {}
  uint64_t bits() { return engine_(); }
  int64_t between(int64_t low, int64_t high) { return low + int64_t(engine_() % uint64_t(high - low + 1)); }
  bool one_in(int n) { return between(1, n) == 1; }
  template <class List>
  const auto& pick(const List& list) {
    return *(std::begin(list) + between(0, int64_t(std::size(list)) - 1));
  }

 private:
  std::mt19937_64 engine_;
};

// A tensor. Its description may be wrong for the call, but it never claims memory that is not there: changing it changes the block.
// The exceptions are claims of more bytes than addresses have, which have to be refused.
class Argument {
 public:
  bool given = false;
  imbrex_dl_type type{};
  imbrex_dl_device device{1, 0};
  int32_t ndim = 0;
  std::vector<int64_t> shape, strides;  // strides: empty is NULL
  uint64_t byte_offset = 0;
  bool null_shape = false, null_data = false;
  std::vector<unsigned char> content;  // elements, last dimension innermost; begins again where the shape asks for more

  void set(imbrex_dl_type, std::vector<int64_t> shape, std::vector<unsigned char> content);
  template <class T>
  void set_numbers(imbrex_dl_type t, std::vector<int64_t> sizes, const std::vector<T>& numbers) {
    const auto* bytes = reinterpret_cast<const unsigned char*>(numbers.data());
    set(t, std::move(sizes), {bytes, bytes + numbers.size() * sizeof(T)});
  }
  size_t element() const { return type.bits >= 8 ? type.bits / 8 : 1; }
  size_t count() const { return content.size() / element(); }
  int64_t number(size_t index) const;  // of integers
  void set_number(size_t index, int64_t value);

  // False: it claims memory that is too large to be had, but not so large that everybody must see it.
  bool is_honest() const;
  // Fresh memory with the content; what the caller hands over, NULL when nothing is given.
  const imbrex_tensor* make();
  const imbrex_tensor* tensor() const { return given ? &tensor_ : nullptr; }
  std::vector<unsigned char> elements() const;  // as they are in memory now, in the order of `content`

 private:
  struct Extent {
    __int128 low = 0, high = 0;  // bytes from the first element on
  };
  Extent extent() const;
  template <class Visit>
  void each_run(const Visit&) const;  // of elements that lie one after the other: the first one's index, its address, and how many

  std::shared_ptr<unsigned char> memory_;
  std::vector<int64_t> given_shape_, given_strides_;
  imbrex_tensor tensor_{};
};

// A struct of the ABI as a caller of some version gives it: a block of its struct_size, with something behind what this version knows.
template <class T>
class Struct {
 public:
  T value{};
  size_t size = sizeof(T);
  unsigned char tail = 0;
  bool given = true;

  T* make() {
    if (!given) return nullptr;
    const size_t bytes = std::max(sizeof(size_t), size > kLargest ? sizeof(T) : size);
    block_.reset(new unsigned char[bytes], std::default_delete<unsigned char[]>());
    std::memset(block_.get(), tail, bytes);
    value.struct_size = size;
    std::memcpy(block_.get(), &value, std::min(bytes, sizeof(T)));
    return reinterpret_cast<T*>(block_.get());
  }

 private:
  static constexpr size_t kLargest = 1024;
  std::shared_ptr<unsigned char> block_;
};

// Host numbers behind a plain pointer.
struct Numbers {
  Numbers() = default;
  explicit Numbers(bool is_given) : given(is_given) {}
  std::vector<int32_t> values;
  bool given = true;
  const int32_t* make() {
    if (!given) return nullptr;
    block_.reset(new int32_t[values.size()], std::default_delete<int32_t[]>());
    std::memcpy(block_.get(), values.data(), values.size() * sizeof(int32_t));
    return block_.get();
  }

 private:
  std::shared_ptr<int32_t> block_;
};

// A custom mask as bits, and where the requests begin in it: with gaps, or, where `starts` is not given, one after the other.
struct PackedMask {
  std::vector<unsigned char> bytes;
  Numbers starts{false};

  // Called for each request in turn.
  void add(int64_t queries, int64_t keys, Random& random) {
    if (starts.given) bytes.resize(bytes.size() + size_t(random.between(0, 2)));
    starts.values.push_back(int32_t(bytes.size()));
    for (int64_t i = 0; i < (queries * keys + 7) / 8; ++i)
      bytes.push_back(random.one_in(3) ? static_cast<unsigned char>(random.bits()) : 0xff);
  }
  void end(Argument& mask) {
    starts.values.push_back(int32_t(bytes.size()));
    mask.set({1, 8, 1}, {int64_t(bytes.size())}, bytes);
  }
  // As long as the number of requests says.
  const int32_t* make_starts(int32_t reqs) {
    constexpr int32_t kMost = 400;  // a batch of more is refused before they are looked at
    if (starts.given) starts.values.resize(size_t(std::clamp(reqs, 0, kMost)) + 1, starts.values.empty() ? 0 : starts.values.back());
    return starts.make();
  }
};

}  // namespace imbrex::test
