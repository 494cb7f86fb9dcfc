// What torch asks of an accelerator as a whole: is it there, its pinned memory, its generators.
#pragma once

namespace simnpu {

// Registers allocators and hooks with torch. Called once, after InitDevices().
void RegisterHooks();

}  // namespace simnpu
