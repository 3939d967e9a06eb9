// The result of `kvtamp plan`: one object, as JSON or as tables for people.
#pragma once

#include <string>
#include <vector>

#include "tools/kvtamp/json.h"
#include "tools/kvtamp/plan.h"

namespace kvtamp::tool {

// One thing that makes the cache smaller: bytes of a user's context with it alone, and with it and
// those before it in the list.
struct Lever {
  std::string name;
  double alone = 0, in_turn = 0;
};

struct Plan {
  const ModelLayout* layout = nullptr;
  PlanQuestion question;
  Sharing sharing;
  PlanAnswer answer;
  std::vector<PlanType> types;  // answer.type is an index
  double whole = 0;             // a user's context in f16, every layer keeping all of it
  std::vector<Lever> levers;
  std::vector<std::string> command;  // to run; empty where there is nothing to gain
  std::vector<std::string> notes;    // what else the user must know: sentences
};

Json PlanJson(const Plan& plan);
// From that object.
std::string PlanText(const Json& j);

}  // namespace kvtamp::tool
