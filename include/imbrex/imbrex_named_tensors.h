/* Tensors by name, for expressions. A part of imbrex.h, which includes it. */
#ifndef IMBREX_NAMED_TENSORS_H
#define IMBREX_NAMED_TENSORS_H
#include <stdint.h>

/* names[i] is what an expression calls tensors[i], of i32, f32 or u8; both may be NULL where count is 0. */
typedef struct {
  const char* const* names;
  const imbrex_tensor* const* tensors;
  int32_t count, reserved;
} imbrex_named_tensors;

#endif
