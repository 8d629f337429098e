// Sites: where in the program the host issues an operator.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace sim {

struct Place {
  std::string file; // empty: none
  int line = 0;
  std::string function;
};

// Innermost frames outside and inside of torch, and the node of autograd that runs. A thread of autograd may have no
// frame of the program: the program is then where the main thread is, mostly in `backward()`.
struct Site {
  Place program, torch;
  std::string node;
};

enum class Owner { kProgram, kTorch, kOther };

class Sites {
 public:
  // Looks up the site of each entry of the trace from now on. `owners` says by the begins of file names, the longest of
  // which counts, whose code a file has. To be called by the main thread.
  void start(std::vector<std::pair<std::string, Owner>> owners);
  void stop() {
    is_on_ = false;
  }
  bool is_on() const {
    return is_on_;
  }
  // Number of this thread's site, from 1; 0 while sites are not looked up. The caller has the device's lock.
  int64_t here();
  const std::vector<Site>& all() const {
    return sites_;
  }

 private:
  using Code = void*; // PyCodeObject, which is referenced for good: no other will have its address
  using Instruction = std::pair<Code, int>;
  struct Frames {
    Instruction program{}, torch{};
  };

  Frames innermost(void* thread);
  Owner owner_of(Code code);
  static Place place_of(Instruction instruction);

  bool is_on_ = false;
  unsigned long main_thread_ = 0;
  std::vector<std::pair<std::string, Owner>> owners_;
  std::map<Code, Owner> owner_of_;
  std::map<std::tuple<Instruction, Instruction, std::string>, int64_t> numbers_;
  std::vector<Site> sites_;
};

Sites& sites();

} // namespace sim
