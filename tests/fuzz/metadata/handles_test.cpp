// Wrong arguments of all that the C ABI has beside plans: specs, devices, selections, caches, copies, merges, block pools, and backends
// from outside. Cases are numbered, see cases.h.
#include <algorithm>
#include <climits>

#include "fuzz/metadata/breakage.h"
#include "fuzz/metadata/cases.h"

namespace imbrex::test {
namespace {

constexpr int kHandleCases = 1500;

// True when it went well.
bool done(imbrex_status status, const char* call, bool verbose) {
  if (verbose) std::printf("%s: %s\n", call, status == IMBREX_OK ? "done" : imbrex_last_error());
  if (status != IMBREX_OK) expect_explained(status, call);
  return status == IMBREX_OK;
}

Argument halves(std::vector<int64_t> shape) {
  int64_t count = 1;
  for (const int64_t n : shape) count *= n;
  Argument a;
  a.set_numbers(kFloat, std::move(shape), std::vector<float>(size_t(count), 0.5f));
  return a;
}

void merge_parts(Random& random, bool verbose) {
  const int64_t tokens = random.between(0, 5), heads = random.between(1, 3), dim = random.between(1, 140), count = random.between(1, 3);
  std::vector<Argument> tensors;  // of parts, out and lse
  for (int64_t i = 0; i <= count; ++i) tensors.push_back(halves({tokens, heads, dim})), tensors.push_back(halves({tokens, heads}));
  const auto merge = [&](int32_t number, bool parts_given) {
    std::vector<imbrex_partial_result> parts;
    for (Argument& a : tensors) a.make();
    for (size_t i = 0; i + 2 < tensors.size(); i += 2) parts.push_back({tensors[i].tensor(), tensors[i + 1].tensor()});
    return imbrex_merge_partial_results(parts_given ? parts.data() : nullptr, number, tensors.end()[-2].tensor(), tensors.back().tensor(),
                                        nullptr);
  };
  ASSERT_EQ(merge(int32_t(count), true), IMBREX_OK) << imbrex_last_error();
  std::string what;
  const auto i = size_t(random.between(0, int64_t(tensors.size()) - 1));
  break_argument(tensors[i], random, what);
  if (random.one_in(3)) break_argument(tensors[size_t(random.between(0, int64_t(tensors.size()) - 1))], random, what);
  if (verbose) std::printf("tensor %zu of %zu: %s\n", i, tensors.size(), what.c_str());
  SCOPED_TRACE(what);
  const int32_t numbers[] = {int32_t(count), int32_t(count), 0, -1, INT32_MIN};
  done(merge(random.pick(numbers), !random.one_in(20)), "merge", verbose);
}

imbrex_spec_fields cached_fields(Random& random) {
  imbrex_spec_fields f = small_fields();
  f.head_dim_qk = 16, f.head_dim_v = 32, f.block_size = int32_t(random.between(1, 16));
  return f;
}

void copy_blocks(Random& random, bool verbose) {
  const imbrex_spec_fields fields = cached_fields(random);
  const SpecHandle spec = spec_of(fields);
  const int64_t blocks = random.between(2, 9);
  Argument k = halves({blocks, fields.block_size, 2, 16}), v = halves({blocks, fields.block_size, 2, 32});
  Struct<imbrex_kv_cache> kv;
  Numbers from, to;
  const int64_t half = random.between(1, blocks / 2);
  for (int64_t i = 0; i < half; ++i) from.values.push_back(int32_t(i)), to.values.push_back(int32_t(blocks - 1 - i));
  const auto copy = [&](int64_t count) {
    k.make(), v.make();
    kv.value.k = k.tensor(), kv.value.v = v.tensor();
    return imbrex_copy_blocks(spec.get(), kv.make(), from.make(), to.make(), count, nullptr);
  };
  ASSERT_EQ(copy(half), IMBREX_OK) << imbrex_last_error();
  std::string what;
  int64_t count = half;
  switch (random.between(0, 5)) {
    case 0: break_argument(random.one_in(2) ? k : v, random, what); break;
    case 1: from.values[0] = wrong_int(random, from.values[0]); break;
    case 2: to.values[size_t(half - 1)] = wrong_int(random, to.values[0]); break;
    case 3: (random.one_in(2) ? from : to).given = false; break;
    case 4: kv.size = size_t(random.between(0, 100)), kv.tail = uint8_t(random.between(0, 1)); break;
    default: count = random.one_in(2) ? 0 : -random.between(1, INT_MAX);
  }
  if (random.one_in(3)) k.shape.assign({blocks - 1, fields.block_size, 2, 16}), v.shape.assign({blocks - 1, fields.block_size, 2, 32});
  done(copy(count), "copy_blocks", verbose);
}

// Whatever is asked of a pool, its counts stay those of a pool; and what fails changes nothing.
void use_pool(Random& random, bool verbose) {
  const int32_t size = int32_t(random.between(1, 12));
  const PoolHandle pool = make_handle<PoolHandle>([&](auto** out) { return imbrex_block_pool_create(size, out); });
  for (int step = 0; step < 40; ++step) {
    const int32_t free = imbrex_block_pool_num_free(pool.get()), cached = imbrex_block_pool_num_cached(pool.get());
    ASSERT_TRUE(free >= 0 && free <= size && cached >= 0 && cached <= size) << free << " " << cached;
    const int32_t count = random.one_in(8) ? -1 : int32_t(random.between(0, 4));
    std::vector<int32_t> blocks(size_t(std::max(count, 0)));
    std::vector<uint64_t> hashes(blocks.size());
    for (auto& b : blocks) b = random.one_in(6) ? wrong_int(random, size) : int32_t(random.between(0, size - 1));
    for (auto& h : hashes) h = uint64_t(random.between(0, 5));
    int32_t* const ids = random.one_in(12) ? nullptr : blocks.data();
    const auto block = [&] { return random.one_in(6) ? wrong_int(random, size) : int32_t(random.between(0, size - 1)); };
    int32_t found = 0;
    imbrex_status status = IMBREX_OK;
    switch (random.between(0, 6)) {
      case 0: status = imbrex_block_pool_allocate(pool.get(), count, ids); break;
      case 1: status = imbrex_block_pool_retain(pool.get(), ids, count); break;
      case 2: status = imbrex_block_pool_release(pool.get(), ids, count); break;
      case 3: status = imbrex_block_pool_lookup(pool.get(), random.one_in(9) ? nullptr : hashes.data(), count, ids, &found); break;
      case 4: status = imbrex_block_pool_publish(pool.get(), block(), uint64_t(random.between(0, 5))); break;
      case 5: status = imbrex_block_pool_make_writable(pool.get(), block(), random.one_in(9) ? nullptr : &found); break;
      default: imbrex_hash_block(1, hashes.data(), random.one_in(2) ? count : -1);
    }
    if (!done(status, "block_pool", verbose)) {
      EXPECT_EQ(imbrex_block_pool_num_free(pool.get()), free);
      EXPECT_EQ(imbrex_block_pool_num_cached(pool.get()), cached);
    }
  }
}

void allocate_cache(Random& random, bool verbose) {
  imbrex_spec_fields fields = cached_fields(random);
  if (random.one_in(3)) fields.block_size = int32_t(random.one_in(2) ? 0 : 65536);
  const SpecHandle spec = spec_of(fields);
  const DeviceHandle device = cpu();
  constexpr const char* kOrders[] = {"lbhtd", "blthd", "", "lbht", "lbhtdx", "lbhtt", "dthbl", nullptr};
  constexpr int32_t kLayers[] = {1, 2, 0, -1, INT32_MIN, INT32_MAX};
  constexpr int64_t kBlocks[] = {1, 3, 0, -1, INT64_MIN, INT32_MAX, INT64_MAX, int64_t(1) << 40};
  const AllocationHandle memory = make_handle<AllocationHandle>([&](auto** out) {
    const imbrex_status status = imbrex_kv_allocation_create(spec.get(), random.one_in(20) ? nullptr : device.get(), random.pick(kLayers),
                                                             random.pick(kBlocks), random.pick(kOrders), out);
    done(status, "kv_allocation", verbose);
    return status;
  });
  const int32_t layer = random.one_in(2) ? 0 : wrong_int(random, 1);
  Struct<imbrex_kv_cache> out;
  out.size = random.one_in(2) ? sizeof(imbrex_kv_cache) : size_t(random.between(0, 64));
  done(imbrex_kv_allocation_layer(memory.get(), layer, out.make()), "layer", verbose);
}

void select_backend(Random& random, bool verbose) {
  constexpr const char* kDevices[] = {"cpu",
                                      "cuda:0",
                                      "cuda:9",
                                      "cuda:-1",
                                      "cuda:99999999999999999999",
                                      "h200",
                                      "avx512,32 threads",
                                      "",
                                      "avx512,-1 threads",
                                      "\xff\xfe",
                                      "sm_0",
                                      "amx,2147483648 threads",
                                      ",,,",
                                      nullptr};
  constexpr const char* kNames[] = {nullptr, "", "cpu_generic", "FLASH_ATTN", "fa3", "nothing", "\xff", "reference"};
  const DeviceHandle device = make_handle<DeviceHandle>([&](auto** out) {
    const imbrex_status status = imbrex_device_create(random.pick(kDevices), out);
    done(status, "device", verbose);
    return status;
  });
  Struct<imbrex_device_properties> properties;
  properties.size = random.one_in(2) ? sizeof(imbrex_device_properties) : size_t(random.between(0, 100));
  done(imbrex_device_get_properties(device.get(), properties.make()), "properties", verbose);
  Struct<imbrex_spec_fields> fields;
  fields.value = small_fields();
  if (random.one_in(3)) fields.size = size_t(random.between(0, 200)), fields.tail = uint8_t(random.between(0, 1));
  auto* numbers = &fields.value.kind;  // int32 up to the floats
  for (int64_t i = random.between(0, 2); i-- > 0;) numbers[random.between(0, 13)] = wrong_int(random, 1);
  imbrex_spec* made = nullptr;
  if (!done(imbrex_spec_create(fields.make(), &made), "spec", verbose)) {
    EXPECT_EQ(made, nullptr);
  }
  const SpecHandle spec(made);
  Struct<imbrex_select_options> options;
  options.given = !random.one_in(4);
  options.value.forced = random.pick(kNames), options.value.forced_prefill = random.pick(kNames);
  options.value.forced_decode = random.pick(kNames), options.value.phase = random.one_in(3) ? wrong_int(random, 0) : 0;
  imbrex_selection* selected = nullptr;
  if (!done(imbrex_select(spec.get(), device.get(), options.make(), &selected), "select", verbose)) return;
  const SelectionHandle selection(selected);
  const int32_t index = wrong_int(random, imbrex_selection_num_candidates(selected)), reason = wrong_int(random, 0);
  imbrex_selection_candidate(selected, index), imbrex_selection_proposal(selected, index);
  imbrex_reason why{};
  done(imbrex_selection_reason(selected, index, reason, random.one_in(9) ? nullptr : &why), "reason", verbose);
  imbrex_plan* plan = nullptr;
  if (imbrex_selection_backend(selected) == nullptr) done(imbrex_plan_create(selected, nullptr, &plan), "plan", verbose);
  EXPECT_EQ(plan, nullptr);
}

void register_backends(Random& random, bool verbose) {
  Struct<imbrex_backend> b;
  b.value.name = "fuzzed", b.value.description = "does nothing";
  b.value.unsupported = [](void*, const imbrex_spec_fields*, const imbrex_device_properties*, const imbrex_reasons* to) {
    to->add(to->context, nullptr, "something", nullptr);
  };
  b.value.plan = [](void*, const imbrex_spec_fields*, const imbrex_device_properties*, const imbrex_plan_options*, void**) {
    return imbrex_status(IMBREX_INTERNAL);
  };
  b.value.plan_free = [](void*) {};
  b.value.update = [](void*, const imbrex_batch*, void*) { return imbrex_status(IMBREX_OK); };
  b.value.write_kv = [](void*, const imbrex_kv_cache*, const imbrex_tensor*, const imbrex_tensor*, void*) {
    return imbrex_status(IMBREX_OK);
  };
  b.value.run = [](void*, const imbrex_inputs*, const imbrex_outputs*, void*) { return imbrex_status(IMBREX_OK); };
  switch (random.between(0, 6)) {
    case 0: b.value.name = nullptr; break;
    case 1: b.value.name = "cpu_generic"; break;
    case 2: b.value.run = nullptr; break;
    case 3: b.value.plan_free = nullptr; break;
    case 4: b.size = size_t(random.between(0, 200)), b.tail = uint8_t(random.between(0, 1)); break;
    case 5: b.given = false; break;
    default: break;
  }
  if (done(imbrex_register_backend(b.make()), "register", verbose)) {
    done(imbrex_register_backend(b.make()), "register again", verbose);
    const SpecHandle spec = spec_of(small_fields());
    const DeviceHandle device = cpu();
    done(select_for(spec.get(), device.get(), "fuzzed") ? IMBREX_OK : IMBREX_INVALID, "select", verbose);
    EXPECT_EQ(imbrex_unregister_backend("fuzzed"), IMBREX_OK);
  }
  constexpr const char* kNames[] = {"fuzzed", "cpu_generic", "", nullptr, "\xff"};
  done(imbrex_unregister_backend(random.pick(kNames)), "unregister", verbose);
  constexpr const char* kPaths[] = {nullptr, "", "/", "/dev/null", "no such file", "libm.so.6"};
  done(imbrex_load_plugin(random.pick(kPaths)), "load_plugin", verbose);
}

TEST(Metadata, WrongArgumentsOfHandlesGetAnErrorOrAResult) {
  constexpr void (*kSurfaces[])(Random&, bool) = {merge_parts, copy_blocks, use_pool, allocate_cache, select_backend, register_backends};
  for_each_case(kHandleCases, [&](int number, bool verbose) {
    Random random{uint64_t(number)};
    kSurfaces[size_t(number) % std::size(kSurfaces)](random, verbose);
  });
}

}  // namespace
}  // namespace imbrex::test
