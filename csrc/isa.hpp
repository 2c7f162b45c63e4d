// Which instruction set runs: the best one that this processor has, unless one is forced.
#pragma once

#include <string>
#include <vector>

#include "kernels.hpp"

namespace bankfull {

std::vector<std::string> available_isas();  // best first; "generic" is always there
std::string current_isa();
void set_isa(const std::string& name);  // std::invalid_argument where this processor does not have it
const Kernels& kernels();

}  // namespace bankfull
