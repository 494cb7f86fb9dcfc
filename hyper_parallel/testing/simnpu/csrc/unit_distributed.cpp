// Second of the two files the compiler is given; see unit_device.cpp.
#include "bindings.cpp"
#include "collective_buffers.cpp"
#include "hccl_backend.cpp"
#include "hccl_work.cpp"
