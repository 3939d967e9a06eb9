// tools/kvtamp/text_score.h for test_eval.py: each line of stdin is {"texts": […], "references":
// […]}, its answer {"bleu": …, "rouge_l": […]}.
#include "tools/kvtamp/text_score.h"

#include <iostream>
#include <nlohmann/json.hpp>

int main() {
  for (std::string line; std::getline(std::cin, line);) {
    const auto asked = nlohmann::json::parse(line);
    kvtamp::tool::BleuCounts counts;
    nlohmann::json answer;
    for (std::size_t i = 0; i < asked.at("texts").size(); ++i) {
      const std::string text = asked["texts"][i], reference = asked["references"][i];
      counts += kvtamp::tool::CountBleu(text, reference);
      answer["rouge_l"].push_back(kvtamp::tool::RougeL(text, reference));
    }
    answer["bleu"] = kvtamp::tool::Bleu(counts);
    std::cout << answer << std::endl;
  }
}
