#pragma once
// A step of attention through the C ABI with all that a caller gives: right as it is made, and then broken on purpose.
#include <array>
#include <string>

#include "api/handles.h"
#include "fuzz/metadata/argument.h"

namespace imbrex::test {

// Where it runs: a device and one backend, or one for each phase.
struct Target {
  std::string name;
  const imbrex_device* device;
  std::string prefill, decode;
  bool cuda;
  bool by_phase() const { return prefill != decode; }
};

// The calls that a caller makes, in this order.
enum class Call { update, write_kv, run };

struct Problem {
  const Target* target = nullptr;
  Struct<imbrex_spec_fields> spec;
  Struct<imbrex_plan_options> options;
  int32_t decode_max_q = 1;

  Struct<imbrex_batch> batch;
  Numbers starts, lens, positions;
  int32_t first_position = 3;  // of the first query, where the spec has positions
  Argument block_table, kv_indptr, kv_indices, kv_last_page_len, kv_start_loc, slot_mapping, custom_mask, packed_mask;
  PackedMask bits;  // of packed_mask

  Struct<imbrex_kv_cache> kv;
  Argument k_cache, v_cache, k_scale, v_scale, k_rope, k_rope_scale;
  Argument new_k, new_v;
  Struct<imbrex_inputs> inputs;
  Argument q, q_scale, sinks, alibi_slopes, head_scales, relative_bias;
  Struct<imbrex_outputs> outputs;
  Argument out, lse;
  std::vector<Call> calls{Call::update, Call::run};

  struct Named {
    const char* name;
    Argument Problem::*argument;
    bool is_index;  // its numbers say where something lies
    bool of_batch;  // what it shows has to stay until the next update
  };
  static const std::array<Named, 24>& arguments();

  bool writes() const { return slot_mapping.given; }
  void make_memory(bool of_batch = true);  // fresh, of everything that is given, or of all but the batch
  imbrex_status update(imbrex_plan*);
  imbrex_status write_kv(imbrex_plan*);
  imbrex_status run(imbrex_plan*);
  imbrex_status call(Call, imbrex_plan*);
  std::vector<unsigned char> written() const;  // by run: out and lse
  std::vector<unsigned char> cached() const;   // all tensors of the cache

 private:
  const imbrex_kv_cache* c_cache();
};

// A problem without a mistake that the target runs.
Problem right_problem(const Target&, Random&);

// A plan for the spec and options of a problem, on its target; null when the library refuses.
PlanHandle plan_of(Problem&);

}  // namespace imbrex::test
