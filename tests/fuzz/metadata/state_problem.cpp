// See state_problem.h.
#include "fuzz/metadata/state_problem.h"

#include <numeric>

namespace imbrex::test {

void StateProblem::make_step(int num_drafts, bool tree_drafts, Random& random) {
  options.value = init(imbrex_plan_options_init);
  batch.value = init(imbrex_batch_init);
  options.value.max_num_reqs = 6, options.value.max_num_tokens = 64, options.value.max_seq_len = 1000;
  const int reqs = int(random.between(1, 5));
  std::vector<int32_t> order(kStateSlots);
  std::iota(order.begin(), order.end(), 0);
  for (size_t i = order.size(); i > 1; --i) std::swap(order[i - 1], order[size_t(random.between(0, int64_t(i) - 1))]);
  starts.values = {0};
  for (int r = 0; r < reqs; ++r) {
    const int q_len = int(random.between(0, 6)), past = random.one_in(2) ? 0 : int(random.between(1, 90));
    starts.values.push_back(starts.values.back() + q_len), lens.values.push_back(past + q_len);
    slots.values.push_back(order[size_t(r)]);
    sources.values.push_back(random.one_in(2) ? order[size_t(r)] : order[size_t(random.between(reqs, kStateSlots - 1))]);
    drafts.values.push_back(int32_t(random.between(0, std::min(q_len, num_drafts))));
    for (int t = 0, certain = q_len - drafts.values.back(); t < q_len; ++t)
      parents.values.push_back(int32_t(random.between(t < certain ? -5 : certain - 1, t < certain ? 5 : t - 1)));
    accepted.values.push_back(past > 0 ? int32_t(random.between(0, num_drafts)) : 0);
  }
  drafts.given = accepted.given = num_drafts > 0;
  sources.given = random.one_in(2), parents.given = tree_drafts && random.one_in(2);
  parents.values.resize(size_t(options.value.max_num_tokens), -1);  // longer steps are refused before it is read
  batch.value.num_reqs = reqs;
}

imbrex_status StateProblem::update(imbrex_plan* plan) {
  imbrex_batch& b = batch.value;
  b.query_start_loc = starts.make(), b.seq_lens = lens.make(), b.state_slots = slots.make();
  b.num_drafts = drafts.make(), b.accepted_drafts = accepted.make(), b.source_slots = sources.make(), b.draft_parents = parents.make();
  return imbrex_plan_update(plan, batch.make(), nullptr);
}

void set_random(Argument& a, const imbrex_dl_type& type, std::vector<int64_t> shape, const StateTarget& target, Random& random) {
  int64_t bytes = type.bits / 8;
  for (const int64_t n : shape) bytes *= n;
  std::vector<unsigned char> content(static_cast<size_t>(bytes), 0x3f);
  for (size_t i = 0; i < content.size(); i += size_t(type.bits / 8)) content[i] = (unsigned char)(random.between(0, 255));
  a.set(type, std::move(shape), std::move(content));
  if (target.cuda) a.device = {2, 0};
}

void append_written(const Argument& a, std::vector<unsigned char>& to) {
  if (!a.given) return;
  const std::vector<unsigned char> elements = a.elements();
  to.insert(to.end(), elements.begin(), elements.end());
}

std::string break_requests(StateProblem& p, Random& random) {
  const int32_t reqs = p.batch.value.num_reqs =
      random.one_in(3) ? wrong_int(random, p.batch.value.num_reqs) % 400 : p.batch.value.num_reqs + int32_t(random.between(-1, 1));
  for (const auto list : StateProblem::kLists)  // as long as their number says
    if (list != &StateProblem::parents)
      (p.*list).values.resize(size_t(std::clamp(reqs, 0, 400) + (list == &StateProblem::starts)), (p.*list).values.empty() ? 0 : 1);
  return fmt::format("num_reqs = {}", reqs);
}

std::string break_list(StateProblem& p, Random& random) {
  const size_t which = size_t(random.between(0, int64_t(std::size(StateProblem::kLists)) - 1));
  Numbers& list = p.*StateProblem::kLists[which];
  if (random.one_in(8)) return list.given = !list.given, fmt::format("list {} is {}", which, list.given ? "given" : "NULL");
  if (list.values.empty()) return "";
  int32_t& number = list.values[size_t(random.between(0, int64_t(list.values.size()) - 1))];
  number = wrong_int(random, number);
  return fmt::format("list {} has {}", which, number);
}

std::string break_calls(StateProblem& p, Random& random) {
  p.update_first = random.one_in(2), p.runs = int(random.between(0, 3));
  return fmt::format("update {}, {} runs", p.update_first, p.runs);
}

}  // namespace imbrex::test
