// See breakage.h.
#include "fuzz/metadata/breakage.h"

#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "attention/spec_fields.h"

namespace imbrex::test {
namespace {

constexpr int64_t kMin32 = std::numeric_limits<int32_t>::min(), kMax32 = std::numeric_limits<int32_t>::max();
constexpr int64_t kMin64 = std::numeric_limits<int64_t>::min(), kMax64 = std::numeric_limits<int64_t>::max();

int32_t plus(int32_t a, int32_t b) { return int32_t(uint32_t(a) + uint32_t(b)); }  // what is wrong already may wrap

// An int32 of a struct, named.
template <class T>
struct Field {
  const char* name;
  int32_t T::*field;
};

template <class T, size_t n>
std::string break_field(T& value, const Field<T> (&fields)[n], Random& random) {
  const Field<T>& f = random.pick(fields);
  value.*f.field = wrong_int(random, value.*f.field);
  return fmt::format("{} = {}", f.name, value.*f.field);
}

using Options = imbrex_plan_options;
// `validate` is not among them: it is how a caller promises that there are no mistakes.
constexpr Field<Options> kOptions[] = {
    {"max_num_reqs", &Options::max_num_reqs},   {"max_num_tokens", &Options::max_num_tokens}, {"max_seq_len", &Options::max_seq_len},
    {"max_query_len", &Options::max_query_len}, {"min_query_len", &Options::min_query_len},   {"num_workers", &Options::num_workers},
    {"balanced", &Options::balanced},           {"load_on_demand", &Options::load_on_demand}, {"on_device", &Options::on_device}};

float wrong_float(Random& random) {
  constexpr float kValues[] = {0.f,
                               -1.f,
                               1e-45f,
                               3e38f,
                               std::numeric_limits<float>::infinity(),
                               -std::numeric_limits<float>::infinity(),
                               std::numeric_limits<float>::quiet_NaN()};
  return random.pick(kValues);
}

std::string break_spec(Problem& p, Random& random) {
  std::vector<std::pair<std::string_view, int32_t*>> ints;
  std::vector<std::pair<std::string_view, float*>> floats;
  std::vector<std::pair<std::string_view, const char**>> texts;
  const AttentionSpec names;
  for_each_named_field(names, p.spec.value, [&](const SpecField& field, const auto&, auto& value) {
    if constexpr (std::is_same_v<decltype(value), float&>)
      floats.emplace_back(field.name, &value);
    else if constexpr (std::is_same_v<decltype(value), const char*&>)
      texts.emplace_back(field.name, &value);
    else
      ints.emplace_back(field.name, &value);
  });
  const auto broken = [&](const auto& fields, const auto& wrong) {
    const auto& [name, value] = fields[size_t(random.between(0, int64_t(fields.size()) - 1))];
    *value = wrong(*value);
    return fmt::format("spec.{} = {}", name, *value);
  };
  if (random.one_in(5)) return broken(floats, [&](float) { return wrong_float(random); });
  constexpr const char* kWrongTexts[] = {"kv <=", "q", "nobody[q]", "((((", "int t[,,,]; t[q]", "score <= 1.0 | kv", "=", "\xff"};
  if (random.one_in(9)) return broken(texts, [&](const char*) { return random.pick(kWrongTexts); });
  return broken(ints, [&](int32_t right) { return wrong_int(random, right); });
}

std::string break_options(Problem& p, Random& random) {
  if (random.one_in(9)) return p.decode_max_q = wrong_int(random, p.decode_max_q), fmt::format("decode_max_q = {}", p.decode_max_q);
  if (random.one_in(9)) {
    p.options.value.parallel_for = [](void*, int num_workers, void (*body)(void*, int), void* argument) {
      for (int w = 0; w < num_workers; ++w) body(argument, w);
    };
    constexpr int32_t kCounts[] = {-1, 0, 1, 3, 100};
    p.options.value.num_workers = random.pick(kCounts);
    return fmt::format("parallel_for with {} workers", p.options.value.num_workers);
  }
  return "options." + break_field(p.options.value, kOptions, random);
}

std::string break_struct(Problem& p, Random& random) {
  switch (random.between(0, 5)) {
    case 0: return break_size("spec", p.spec, random);
    case 1: return break_size("options", p.options, random);
    case 2: return break_size("batch", p.batch, random);
    case 3: return break_size("kv", p.kv, random);
    case 4: return break_size("inputs", p.inputs, random);
    default: return break_size("outputs", p.outputs, random);
  }
}

// Arrays stay as long as the number of requests says.
std::string break_lengths(Problem& p, Random& random) {
  if (random.one_in(12)) return (random.one_in(2) ? p.starts : p.lens).given = false, "lengths are NULL";
  if (random.one_in(12)) return p.first_position = wrong_int(random, 3), fmt::format("positions[0] = {}", p.first_position);
  int32_t& reqs = p.batch.value.num_reqs;
  if (random.one_in(4)) {
    constexpr int32_t kOthers[] = {-1, 0, 1, 2, 9, 300, int32_t(kMin32)};
    const int32_t wanted = random.one_in(2) ? reqs + int32_t(random.between(-1, 1)) : random.pick(kOthers);
    reqs = wanted;
    const auto count = size_t(std::clamp(reqs, 0, 300));
    p.starts.values.resize(count + 1, p.starts.values.back()), p.lens.values.resize(count, 1);
    return fmt::format("num_reqs = {}", reqs);
  }
  if (p.bits.starts.given && random.one_in(4)) {
    int32_t& start = p.bits.starts.values[size_t(random.between(0, int64_t(p.bits.starts.values.size()) - 1))];
    start = wrong_int(random, start);
    return fmt::format("mask_indptr has {}", start);
  }
  const bool starts = random.one_in(2) || p.lens.values.empty();
  auto& values = starts ? p.starts.values : p.lens.values;
  const auto i = size_t(random.between(0, int64_t(values.size()) - 1));
  values[i] = wrong_int(random, values[i]);
  return fmt::format("{}[{}] = {}", starts ? "query_start_loc" : "seq_lens", i, values[i]);
}

// Gives a request more keys, in its length and in all that must agree with it: only the tensors are too small then.
std::string longer(Problem& p, Random& random) {
  if (p.lens.values.empty()) return "";
  const auto r = size_t(random.between(0, int64_t(p.lens.values.size()) - 1));
  constexpr int32_t kBy[] = {1, 2, 16, 100, 900, 100000};
  const int32_t by = random.pick(kBy);
  p.lens.values[r] = plus(p.lens.values[r], by);
  for (size_t i = r + 1; p.kv_start_loc.given && i < p.kv_start_loc.count(); ++i)
    p.kv_start_loc.set_number(i, p.kv_start_loc.number(i) + by);
  return fmt::format("request {} has {} more keys", r, by);
}

// Ragged rows that begin later than they may.
std::string shifted(Problem& p, Random& random) {
  constexpr int64_t kBy[] = {1, 5, 1000, 100000000};
  const int64_t by = random.pick(kBy);
  for (size_t i = 0; p.kv_start_loc.given && i < p.kv_start_loc.count(); ++i) p.kv_start_loc.set_number(i, p.kv_start_loc.number(i) + by);
  return p.kv_start_loc.given ? fmt::format("kv_start_loc is {} later", by) : "";
}

std::string more_queries(Problem& p, Random& random) {
  constexpr int32_t kBy[] = {1, 3, 40};
  const int32_t by = random.pick(kBy);
  const auto r = size_t(random.between(0, int64_t(p.starts.values.size()) - 1));
  for (size_t i = r; i < p.starts.values.size(); ++i) p.starts.values[i] = plus(p.starts.values[i], i > 0 ? by : 0);
  return fmt::format("{} more query tokens from request {} on", by, r);
}

// A tensor that the problem gives, or sometimes one that it does not.
const Problem::Named& some_argument(Problem& p, Random& random) {
  for (;;) {
    const auto& named = random.pick(Problem::arguments());
    if ((p.*named.argument).given || random.one_in(20)) return named;
  }
}

std::string break_number(Problem& p, Random& random) {
  const auto& named = some_argument(p, random);
  Argument& a = p.*named.argument;
  if (!a.given || a.count() == 0) return "";
  const auto i = size_t(random.between(0, int64_t(a.count()) - 1));
  if (named.is_index) {
    const bool wide = a.element() == 8;
    const int64_t n = wrong_number(random, a.number(i), wide ? kMin64 : kMin32, wide ? kMax64 : kMax32);
    a.set_number(i, n);
    return fmt::format("{}[{}] = {}", named.name, i, n);
  }
  if (a.type.code != 2 || a.element() != 4) return "";
  const float x = wrong_float(random);
  std::memcpy(&a.content[i * 4], &x, 4);
  return fmt::format("{}[{}] = {}", named.name, i, x);
}

std::string break_tensor(Problem& p, Random& random) {
  const auto& named = some_argument(p, random);
  Argument& a = p.*named.argument;
  std::string what;
  if (!a.given) return a.set_numbers(kFloat, {4}, std::vector<float>(4, 1.f)), fmt::format("{} is given", named.name);
  if (random.one_in(8)) {
    const auto& other = some_argument(p, random);
    if (!(p.*other.argument).given) return "";
    return a = p.*other.argument, fmt::format("{} is a copy of {}", named.name, other.name);
  }
  if (!break_argument(a, random, what)) return "";
  // What a kernel finds in a device's memory is no metadata of the host: nobody can have checked it.
  if (p.target->cuda && named.is_index && a.device.type != 1) a.device = {1, 0}, what += ", on the host";
  return fmt::format("{}: {}", named.name, what);
}

std::string break_cache(Problem& p, Random& random) {  // fewer blocks, or rows, than the batch names
  if (p.k_cache.shape.empty() || p.k_cache.shape[0] < 1) return "";
  const int64_t n = random.between(0, p.k_cache.shape[0] - 1);
  const bool both = !random.one_in(5);
  p.k_cache.shape[0] = n;
  for (Argument* other : {&p.v_cache, &p.k_rope})
    if (both && !other->shape.empty()) other->shape[0] = n;
  return fmt::format("{} has {} blocks", both ? "kv" : "kv.k", n);
}

std::string break_order(Broken& b, Random& random) {
  const std::vector<Call> orders[] = {{Call::run},
                                      {Call::write_kv, Call::run},
                                      {Call::update, Call::write_kv, Call::run},
                                      {Call::update, Call::update, Call::run, Call::run},
                                      {Call::update, Call::run, Call::write_kv, Call::update, Call::run}};
  b.problem.calls = random.pick(orders);
  b.fresh_plan = random.one_in(2);
  std::string text = b.fresh_plan ? "fresh plan:" : "";
  for (const Call c : b.problem.calls) text += c == Call::update ? " update" : c == Call::run ? " run" : " write_kv";
  return text;
}

std::string break_once(Broken& b, Random& random) {
  Problem& p = b.problem;
  switch (random.between(0, 12)) {
    case 0: b.new_plan = true; return break_spec(p, random);
    case 1: b.new_plan = true; return break_options(p, random);
    case 2: b.new_plan = true; return break_struct(p, random);
    case 3: return break_order(b, random);
    case 4: return break_cache(p, random);
    case 5: return longer(p, random);
    case 6: return random.one_in(2) ? shifted(p, random) : more_queries(p, random);
    case 7:
    case 8: return break_lengths(p, random);
    case 9:
    case 10: return break_number(p, random);
    default: return break_tensor(p, random);
  }
}

}  // namespace

int64_t wrong_number(Random& random, int64_t right, int64_t low, int64_t high) {
  for (;;) {
    const int64_t numbers[] = {0,
                               1,
                               -1,
                               -2,
                               right,
                               right / 2,
                               3,
                               7,
                               15,
                               16,
                               17,
                               64,
                               255,
                               1000,
                               65536,
                               1 << 20,
                               1 << 30,
                               kMax32,
                               kMax32 - 1,
                               kMin32,
                               kMax32 + 1,
                               int64_t(1) << 32,
                               int64_t(1) << 40,
                               int64_t(1) << 62,
                               kMax64,
                               kMin64};
    int64_t n = random.pick(numbers);
    if (random.one_in(3)) n = right > kMax32 ? right - 1 : std::max(right, kMin32) + random.between(-3, 3);
    if (n != right && n >= low && n <= high) return n;
  }
}

int32_t wrong_int(Random& random, int64_t right) { return int32_t(wrong_number(random, right, kMin32, kMax32)); }

std::string break_limits(imbrex_plan_options& o, Random& random) {
  int32_t* const fields[] = {&o.max_num_reqs, &o.max_num_tokens, &o.max_seq_len, &o.max_query_len, &o.min_query_len, &o.on_device};
  int32_t& field = *random.pick(fields);
  field = wrong_int(random, field);
  return fmt::format("a field of the options = {}", field);
}

bool break_argument(Argument& a, Random& random, std::string& what) {
  const Argument before = a;
  const auto some_dim = [&] { return size_t(random.between(0, int64_t(a.shape.size()) - 1)); };
  switch (random.between(0, 11)) {
    case 0: a.given = false, what = "NULL"; break;
    case 1: a.null_data = true, what = "no data"; break;
    case 2: a.null_shape = true, what = "no shape"; break;
    case 3: {
      constexpr imbrex_dl_type kTypes[] = {{2, 32, 1}, {2, 16, 1}, {4, 16, 1}, {10, 8, 1}, {12, 8, 1}, {1, 8, 1}, {0, 32, 1},
                                           {0, 64, 1}, {2, 64, 1}, {9, 99, 1}, {2, 32, 4}, {0, 0, 0},  {0, 8, 1}};
      a.type = random.pick(kTypes);
      what = fmt::format("type {} {} {}", a.type.code, a.type.bits, a.type.lanes);
      break;
    }
    case 4: {
      const imbrex_dl_device devices[] = {{1, 0}, {2, 0}, {2, 1}, {2, -1}, {3, 0}, {13, 0}, {7, 0}, {-1, 0}, {1, 5}};
      a.device = random.pick(devices);
      what = fmt::format("device {} {}", a.device.type, a.device.index);
      break;
    }
    case 5: {
      constexpr int32_t kRanks[] = {-1, 0, 1, 2, 3, 4, 5, 6, 1000, int32_t(kMax32), int32_t(kMin32)};
      a.ndim = random.pick(kRanks);
      const auto dims = size_t(std::clamp(a.ndim, 0, 1000));
      a.shape.resize(dims, 1);
      if (!a.strides.empty()) a.strides.resize(dims, 1);
      what = fmt::format("{} dimensions", a.ndim);
      break;
    }
    case 6: {
      constexpr uint64_t kOffsets[] = {1, 2, 3, 4, 16, 4096, uint64_t(1) << 62, UINT64_MAX};
      a.byte_offset = random.pick(kOffsets);
      what = fmt::format("offset of {} bytes", a.byte_offset);
      break;
    }
    case 7:
    case 8:
      if (a.shape.empty()) return false;
      {
        const size_t d = some_dim();
        if (a.strides.empty() || a.strides.size() != a.shape.size()) {
          a.strides.assign(a.shape.size(), 1);
          for (size_t i = a.shape.size() - 1; i-- > 0;) a.strides[i] = a.strides[i + 1] * std::max<int64_t>(a.shape[i + 1], 1);
        }
        a.strides[d] = wrong_number(random, a.strides[d], kMin64, kMax64);
        what = fmt::format("stride {} of dimension {}", a.strides[d], d);
      }
      break;
    default:
      if (a.shape.empty()) return false;
      {
        const size_t d = some_dim();
        a.shape[d] = wrong_number(random, a.shape[d], kMin64, kMax64);
        what = fmt::format("size {} of dimension {}", a.shape[d], d);
      }
  }
  if (a.is_honest()) return true;
  a = before;
  return false;
}

Broken break_problem(const Problem& right, Random& random, int count) {
  Broken b{.problem = right, .what = ""};
  for (int i = 0; i < count; ++i) {
    for (std::string what; what.empty();) {
      what = break_once(b, random);
      b.what += what.empty() ? "" : (b.what.empty() ? "" : "; ") + what;
    }
  }
  return b;
}

}  // namespace imbrex::test
