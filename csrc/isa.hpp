// The active instruction set: the best one that this CPU supports, unless one is forced.
#pragma once

#include <string>
#include <vector>

#include "kernels.hpp"

namespace bankfull {

std::vector<std::string> available_isas();  // best first; "generic" is always available
std::string current_isa();
void set_isa(const std::string& name);  // std::invalid_argument if this CPU does not support it
const Kernels& kernels();

}  // namespace bankfull
