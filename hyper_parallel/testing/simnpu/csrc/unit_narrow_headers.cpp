// First of the two files the compiler is given: the sources that do with torch's narrow headers.
//
// torch's headers take 5 to 15 s per translation unit. One unit per source took 45 s on two cores,
// two units take half of that.
#include "config.cpp"
#include "convolution_ops.cpp"
#include "copy_ops.cpp"
#include "counters.cpp"
#include "device_guard.cpp"
#include "devices.cpp"
#include "generator.cpp"
#include "hooks.cpp"
#include "host_traffic.cpp"
#include "host_view.cpp"
#include "memory.cpp"
#include "op_arguments.cpp"
#include "operators.cpp"
#include "pinned_memory.cpp"
#include "streams.cpp"
#include "tensor_ops.cpp"
