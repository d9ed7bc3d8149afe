// Memory of the C ABI: caches and their blocks; and the merge of partial results.
#include "api/structs.h"
#include "imbrex/block_pool.h"
#include "imbrex/device_stream.h"
#include "imbrex/merge.h"

using namespace imbrex;
using namespace imbrex::api;

struct imbrex_kv_allocation {
  std::unique_ptr<DeviceStream> stream;  // a GPU's, which the memory is of
  std::unique_ptr<KvAllocation> memory;
  std::vector<std::unique_ptr<CKvCache>> layers;
};

struct imbrex_block_copier {
  std::unique_ptr<BlockCopier> copier;
};

struct imbrex_merger {
  std::unique_ptr<PartialMerger> merger;
};

struct imbrex_block_pool {
  explicit imbrex_block_pool(int num_blocks) : pool(num_blocks) {}
  BlockPool pool;
  std::vector<int32_t> found;  // kept, so that a warm call allocates nothing
};

namespace {

// The attention that a layer's pages are of: its own, or that of latent attention in latent space.
AttentionSpec paged_spec(const imbrex_spec* spec) {
  const LayerSpec& layer = deref(spec, "spec").spec;
  const auto* const mla = std::get_if<MlaSpec>(&layer);
  return mla != nullptr ? mla->latent_spec() : of_family<AttentionSpec>(layer, "spec");
}

// `count` numbers behind a pointer that may be NULL when there are none.
template <class T>
std::span<const T> numbers(const T* pointer, int64_t count, const char* name) {
  check(count >= 0, "api.count", "{}: expected a count of 0 or more, got {}", name, count);
  return count == 0 ? std::span<const T>() : std::span(&deref(pointer, name), size_t(count));
}

std::vector<BlockCopy> copies_of(const int32_t* from, const int32_t* to, int64_t count) {
  const auto sources = numbers(from, count, "from"), targets = numbers(to, count, "to");
  std::vector<BlockCopy> copies;
  copies.reserve(sources.size());
  for (size_t i = 0; i < sources.size(); ++i) copies.push_back({sources[i], targets[i]});
  return copies;
}

ParallelFor parallel_for_of(imbrex_threads* threads) { return threads == nullptr ? ParallelFor{} : threads->pool.parallel_for(); }

BlockPool& pool_of(imbrex_block_pool* pool) { return deref(pool, "pool").pool; }

std::vector<PartialResult> parts_of(const imbrex_partial_result* parts, int32_t count) {
  std::vector<PartialResult> views;
  for (const imbrex_partial_result& part : numbers(parts, count, "parts"))
    views.push_back({.out = view_of(&deref(part.out, "out"), "out"), .lse = view_of(&deref(part.lse, "lse"), "lse")});
  return views;
}

}  // namespace

imbrex_status imbrex_kv_allocation_create(const imbrex_spec* spec, const imbrex_device* device, int32_t num_layers, int64_t num_blocks,
                                          const char* order, imbrex_kv_allocation** out) {
  return create(out, [&] {
    auto handle = std::make_unique<imbrex_kv_allocation>();
    const AttentionSpec s = paged_spec(spec);
    const DeviceInfo& on = deref(device, "device").info;
    if (on.device.type != DeviceType::cpu) handle->stream = open_stream(on);
    handle->memory = std::make_unique<KvAllocation>(s, num_layers, num_blocks, order == nullptr ? "lbhtd" : order, handle->stream.get());
    if (handle->stream) handle->stream->synchronize();
    for (int i = 0; i < num_layers; ++i) handle->layers.push_back(std::make_unique<CKvCache>(handle->memory->layer(i)));
    return handle;
  });
}
void imbrex_kv_allocation_free(imbrex_kv_allocation* allocation) { delete allocation; }
int64_t imbrex_kv_allocation_bytes(const imbrex_kv_allocation* allocation) {
  return allocation == nullptr ? 0 : allocation->memory->bytes();
}
imbrex_status imbrex_kv_allocation_layer(const imbrex_kv_allocation* allocation, int32_t layer, imbrex_kv_cache* out) {
  return guarded([&] {
    const auto& layers = deref(allocation, "allocation").layers;
    check(layer >= 0 && size_t(layer) < layers.size(), "api.index", "layer: expected 0 to {}, got {}", int64_t(layers.size()) - 1, layer);
    write(out, layers[size_t(layer)]->cache, "out");
  });
}

imbrex_status imbrex_copy_blocks(const imbrex_spec* spec, const imbrex_kv_cache* kv, const int32_t* from, const int32_t* to, int64_t count,
                                 imbrex_threads* threads) {
  return guarded([&] { copy_blocks(paged_spec(spec), kv_of(kv), copies_of(from, to, count), parallel_for_of(threads)); });
}

imbrex_status imbrex_block_copier_create(const imbrex_device* device, imbrex_threads* threads, imbrex_block_copier** out) {
  return create(out, [&] {
    auto handle = std::make_unique<imbrex_block_copier>();
    handle->copier = make_block_copier(deref(device, "device").info, parallel_for_of(threads));
    return handle;
  });
}
void imbrex_block_copier_free(imbrex_block_copier* copier) { delete copier; }
imbrex_status imbrex_block_copier_copy(const imbrex_block_copier* copier, const imbrex_spec* spec, const imbrex_kv_cache* kv,
                                       const int32_t* from, const int32_t* to, int64_t count, void* stream) {
  return guarded([&] { deref(copier, "copier").copier->copy(paged_spec(spec), kv_of(kv), copies_of(from, to, count), stream); });
}

imbrex_status imbrex_merge_partial_results(const imbrex_partial_result* parts, int32_t count, const imbrex_tensor* out,
                                           const imbrex_tensor* lse, imbrex_threads* threads) {
  return guarded([&] {
    merge_partial_results(parts_of(parts, count), view_of(&deref(out, "out"), "out"), view_of(lse, "lse"), parallel_for_of(threads));
  });
}

imbrex_status imbrex_merger_create(const imbrex_device* device, imbrex_threads* threads, imbrex_merger** out) {
  return create(out, [&] {
    auto handle = std::make_unique<imbrex_merger>();
    handle->merger = make_partial_merger(deref(device, "device").info, parallel_for_of(threads));
    return handle;
  });
}
void imbrex_merger_free(imbrex_merger* merger) { delete merger; }
imbrex_status imbrex_merger_merge(const imbrex_merger* merger, const imbrex_partial_result* parts, int32_t count, const imbrex_tensor* out,
                                  const imbrex_tensor* lse, void* stream) {
  return guarded([&] {
    deref(merger, "merger").merger->merge(parts_of(parts, count), view_of(&deref(out, "out"), "out"), view_of(lse, "lse"), stream);
  });
}

imbrex_status imbrex_block_pool_create(int32_t num_blocks, imbrex_block_pool** out) {
  return create(out, [&] { return std::make_unique<imbrex_block_pool>(num_blocks); });
}
void imbrex_block_pool_free(imbrex_block_pool* pool) { delete pool; }
int32_t imbrex_block_pool_num_free(const imbrex_block_pool* pool) { return pool == nullptr ? 0 : pool->pool.num_free(); }
int32_t imbrex_block_pool_num_cached(const imbrex_block_pool* pool) { return pool == nullptr ? 0 : pool->pool.num_cached(); }

imbrex_status imbrex_block_pool_allocate(imbrex_block_pool* pool, int32_t count, int32_t* blocks) {
  return guarded([&] {
    BlockPool& p = pool_of(pool);
    numbers(blocks, count, "blocks");
    pool->found.clear();
    check(p.allocate(count, pool->found), "block_pool.exhausted", "expected {} free blocks, {} of {} are", count, p.num_free(),
          p.num_blocks());
    std::ranges::copy(pool->found, blocks);
  });
}

imbrex_status imbrex_block_pool_retain(imbrex_block_pool* pool, const int32_t* blocks, int32_t count) {
  return guarded([&] { pool_of(pool).retain(numbers(blocks, count, "blocks")); });
}
imbrex_status imbrex_block_pool_release(imbrex_block_pool* pool, const int32_t* blocks, int32_t count) {
  return guarded([&] { pool_of(pool).release(numbers(blocks, count, "blocks")); });
}

imbrex_status imbrex_block_pool_lookup(imbrex_block_pool* pool, const uint64_t* hashes, int32_t count, int32_t* blocks,
                                       int32_t* num_found) {
  return guarded([&] {
    BlockPool& p = pool_of(pool);
    int32_t& out = deref(num_found, "num_found");
    numbers(blocks, count, "blocks");
    pool->found.clear();
    out = p.lookup(numbers(hashes, count, "hashes"), pool->found);
    std::ranges::copy(pool->found, blocks);
  });
}

imbrex_status imbrex_block_pool_publish(imbrex_block_pool* pool, int32_t block, uint64_t hash) {
  return guarded([&] { pool_of(pool).publish(block, hash); });
}

imbrex_status imbrex_block_pool_make_writable(imbrex_block_pool* pool, int32_t block, int32_t* out) {
  return guarded([&] {
    int32_t& to = deref(out, "out");
    const std::optional<int32_t> writable = pool_of(pool).make_writable(block);
    check(writable.has_value(), "block_pool.exhausted", "expected a free block for a copy of {}, none is", block);
    to = *writable;
  });
}

imbrex_status imbrex_hash_block_with_key(const uint64_t key[2], uint64_t parent, const uint64_t* token_ids, int64_t count, uint64_t* out) {
  return guarded([&] {
    const uint64_t* const words = &deref(key, "key");
    deref(out, "out") = hash_block({words[0], words[1]}, parent, numbers(token_ids, count, "token_ids"));
  });
}

uint64_t imbrex_hash_block(uint64_t parent, const uint64_t* token_ids, int32_t count) {
  uint64_t hash = 0;
  guarded([&] { hash = hash_block(parent, numbers(token_ids, count, "token_ids")); });
  return hash;
}
