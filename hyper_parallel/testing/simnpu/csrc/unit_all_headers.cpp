// Second of the two files the compiler is given: the sources whose torch headers include all of
// ATen anyway. See unit_narrow_headers.cpp.
#include "autocast.cpp"
#include "bindings.cpp"
#include "collective_buffers.cpp"
#include "hccl_backend.cpp"
#include "hccl_work.cpp"
#include "one_round.cpp"
