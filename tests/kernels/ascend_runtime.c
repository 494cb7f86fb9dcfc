// What code that LLVM 19 made of triton-ascend's linalg calls, besides the C library.
#include <stdint.h>
#include <string.h>

typedef struct {
  int64_t rank;
  void* descriptor;
} UnrankedMemref;

typedef struct {
  char* allocated;
  char* aligned;
  int64_t offset, size, stride;
} Memref1d;

// MLIR's runtime function, for rank 0 and 1.
void memrefCopy(int64_t element_bytes, const UnrankedMemref* source, const UnrankedMemref* target) {
  const Memref1d* from = source->descriptor;
  const Memref1d* to = target->descriptor;
  const int64_t size = source->rank == 0 ? 1 : from->size;
  const int64_t from_stride = source->rank == 0 ? 0 : from->stride;
  const int64_t to_stride = source->rank == 0 ? 0 : to->stride;
  for (int64_t i = 0; i < size; ++i) {
    memcpy(to->aligned + (to->offset + i * to_stride) * element_bytes,
           from->aligned + (from->offset + i * from_stride) * element_bytes, element_bytes);
  }
}

// libgcc has it from version 13 on. A bfloat16 is returned in the low half of a vector register's
// first float, so that this needs no compiler that knows the type.
float __truncsfbf2(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  if (value != value) {
    bits = bits >> 16 | 0x40;
  } else {
    bits = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
  }
  memcpy(&value, &bits, sizeof bits);
  return value;
}
