#pragma once
// The reference backend of recurrent layers: token by token in double precision, which all others are tested against.
#include "imbrex/recurrent.h"

namespace imbrex {

const BackendOf<RecurrentFamily>& recurrent_reference();

}  // namespace imbrex
