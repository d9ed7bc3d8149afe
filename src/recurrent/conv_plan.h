#pragma once
// A recurrence with the convolution in front of it (RecurrentSpec::conv): a plan of each, of the backends of one name, for the same batch.
// What is convolved lies in the plan's scratch.
#include <memory>
#include <string_view>
#include <vector>

#include "imbrex/recurrent.h"
#include "imbrex/short_conv.h"

namespace imbrex {

ShortConvSpec conv_of(const RecurrentSpec&);
RecurrentSpec without_conv(const RecurrentSpec&);

// The kernels of the convolution in front, of the backend of this name, behind those of the recurrence; none where there is no convolution.
void add_conv_choices(std::string_view backend, const RecurrentSpec&, const DeviceInfo&, std::vector<KernelChoice>&);

int64_t conv_row_bytes(const RecurrentSpec&, const PlanLimits&);  // of what is convolved of a step

// `rows`: conv_row_bytes() of the device, aligned to 16 bytes, which live as long as the plan. `options` are for both parts. Errors are
// those of the parts.
std::unique_ptr<RecurrentPlan> make_conv_plan(const BackendOf<RecurrentFamily>&, const RecurrentSpec&, const DeviceInfo&,
                                              const PlanOptions& options, std::shared_ptr<void> rows);
std::shared_ptr<void> conv_rows_of_host(const RecurrentSpec&, const PlanLimits&);

}  // namespace imbrex
