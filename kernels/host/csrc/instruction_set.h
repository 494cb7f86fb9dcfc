// Which instruction set's kernels to use.

#ifndef HYPER_PARALLEL_KERNELS_HOST_INSTRUCTION_SET_H_
#define HYPER_PARALLEL_KERNELS_HOST_INSTRUCTION_SET_H_

#include "chunk_kernels.h"
#include "host_kernels.h"

namespace hyper_parallel {

// The best that this processor supports, unless UseInstructionSet said otherwise.
const InstructionSet& CurrentInstructionSet();

// Returns false if there is none of that name here. "auto" is always there.
bool UseInstructionSet(const char* name);

// Names of those supported, best first, separated by blanks.
const char* InstructionSetNames();

const FormatKernels& KernelsFor(const InstructionSet& set, HyperHostFormat format);

}  // namespace hyper_parallel

#endif  // HYPER_PARALLEL_KERNELS_HOST_INSTRUCTION_SET_H_
