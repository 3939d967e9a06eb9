#include "tools/kvtamp/tasks.h"

#include <fmt/format.h>

#include <algorithm>
#include <cctype>
#include <cmath>
#include <numeric>

#include "tools/kvtamp/text_score.h"

namespace kvtamp::tool {
namespace {

// A token of an answer takes about as long as so many of a prompt: for the time that is left.
constexpr double kAnswerWeight = 4;

Json ToJson(const Answer& answer) {
  return {{"answer", answer.text},
          {"tokens", answer.tokens},
          {"seconds_prompt", answer.seconds_prompt},
          {"seconds", answer.seconds},
          {"size", ToJson(answer.size)}};
}

Result<Answer> FromJson(const Json& j, const std::string& item) {
  try {
    return Answer{j.at("answer"), j.at("tokens").get<Tokens>(), j.at("seconds_prompt"),
                  j.at("seconds"), SizeOfJson(j.at("size"))};
  } catch (const Json::exception&) {
    return Status::Invalid("--resume: " + item + " of the file is not whole");
  }
}

// A line with a letter or a digit in it is over.
bool EndsLine(const std::string& text) {
  const auto word =
      std::ranges::find_if(text, [](unsigned char c) { return c >= 0x80 || std::isalnum(c) != 0; });
  return std::find(word, text.end(), '\n') != text.end();
}

double Work(const Prompt& prompt) {
  return static_cast<double>(prompt.tokens.size()) + kAnswerWeight * prompt.n_predict;
}

int FirstDifference(const Tokens& a, const Tokens& b) {
  const auto [at, other] = std::ranges::mismatch(a, b);
  return at == a.end() && other == b.end() ? -1 : static_cast<int>(at - a.begin());
}

// Of what all segments make together: each left out in turn.
Figure CorpusBleu(const std::vector<BleuCounts>& segments) {
  BleuCounts all;
  for (const BleuCounts& segment : segments) all += segment;
  std::vector<double> without;
  for (const BleuCounts& segment : segments) {
    all -= segment;
    without.push_back(Bleu(all));
    all += segment;
  }
  // The spread of the jackknife is that of a mean, n - 1 times too small.
  const double n = static_cast<double>(segments.size());
  return {Bleu(all), n > 1 ? (n - 1) * MeanOf(without).se : 0};
}

}  // namespace

Vocabulary VocabularyOf(const llama_model* model) {
  const llama_vocab* vocab = llama_model_get_vocab(model);
  Vocabulary out;
  out.encode = [vocab](const std::string& text) { return Tokenize(vocab, text, false); };
  out.piece = [vocab](std::int32_t token) { return Piece(vocab, token); };
  if (llama_vocab_get_add_bos(vocab)) out.begin = {llama_vocab_bos(vocab)};
  return out;
}

Result<std::unique_ptr<Answerer>> Answerer::Make(llama_model* model, Config config) {
  Context context = MakeContext(model, config.shape);
  if (!context) {
    return HostError(
        fmt::format("cannot make the {} context of {} tokens", config.name, config.shape.n_ctx));
  }
  return std::unique_ptr<Answerer>(new Answerer(model, std::move(config), std::move(context)));
}

Answerer::Answerer(llama_model* model, Config config, Context context)
    : config_(std::move(config)),
      vocab_(llama_model_get_vocab(model)),
      context_(std::move(context)),
      batch_(config_.shape.n_batch) {}

Result<std::optional<Answer>> Answerer::Ask(const Prompt& prompt,
                                            const std::function<bool(double)>& go_on) {
  llama_memory_clear(llama_get_memory(context_.get()), true);
  const auto n = static_cast<std::uint32_t>(prompt.tokens.size());
  const std::uint32_t step = config_.token_by_token ? 1 : config_.shape.n_batch;
  Answer answer;
  for (std::uint32_t start = 0, end = 0; start < n; start = end) {
    end = std::min(start + step, n);
    batch_.Clear();
    for (std::uint32_t pos = start; pos < end; ++pos)
      batch_.Add(prompt.tokens[pos], pos, pos + 1 == n);
    if (Status s = Decode(context_.get(), batch_, config_.name, answer.seconds_prompt); !s.ok())
      return s;
    if (!go_on(end / Work(prompt))) return std::optional<Answer>();
  }
  return Write(prompt, std::move(answer), go_on);
}

Result<std::optional<Answer>> Answerer::Write(const Prompt& prompt, Answer answer,
                                              const std::function<bool(double)>& go_on) {
  auto pos = static_cast<std::uint32_t>(prompt.tokens.size());
  while (true) {
    const Result<std::int32_t> token = BestToken();
    if (!token.ok()) return token.status();
    if (llama_vocab_is_eog(vocab_, token.value())) break;
    answer.tokens.push_back(token.value());
    answer.text += Piece(vocab_, token.value());
    if (answer.tokens.size() >= prompt.n_predict || (prompt.one_line && EndsLine(answer.text)))
      break;
    batch_.Clear();
    batch_.Add(token.value(), pos++, true);
    if (Status s = Decode(context_.get(), batch_, config_.name, answer.seconds); !s.ok()) return s;
    const double work = static_cast<double>(prompt.tokens.size()) +
                        kAnswerWeight * static_cast<double>(answer.tokens.size());
    if (!go_on(work / Work(prompt))) return std::optional<Answer>();
  }
  if (config_.size) answer.size = config_.size(pos);
  return std::optional<Answer>(std::move(answer));
}

std::string Answerer::Text(const Tokens& tokens) const {
  std::string text;
  for (const std::int32_t token : tokens) text += Piece(vocab_, token);
  return text;
}

Result<std::int32_t> Answerer::BestToken() const {
  const float* logits = llama_get_logits_ith(context_.get(), -1);
  const float* end = logits + llama_vocab_n_tokens(vocab_);
  // A NaN compares with nothing, so the sum tells.
  if (!std::isfinite(std::accumulate(logits, end, 0.0)))
    return Status::Internal("the logits of the " + config_.name + " cache are not finite");
  return static_cast<std::int32_t>(std::max_element(logits, end) - logits);
}

std::uint32_t ContextOf(std::span<const Prompt> prompts) {
  std::size_t most = 0;
  for (const Prompt& prompt : prompts)
    most = std::max(most, prompt.tokens.size() + prompt.n_predict);
  return static_cast<std::uint32_t>(most);
}

Result<std::vector<std::vector<Answer>>> AnswerAll(std::span<Answerer* const> caches,
                                                   std::span<const Prompt> prompts, RunLog& log,
                                                   const ProgressCall& progress) {
  std::vector<std::vector<Answer>> answers(caches.size());
  double all = 0, done = 0;
  for (const Prompt& prompt : prompts) all += Work(prompt) * static_cast<double>(caches.size());
  for (const Prompt& prompt : prompts) {
    std::vector<Answer> row;
    for (Answerer* cache : caches) {
      const auto go_on = [&](double part) {
        return progress((done + part * Work(prompt)) / all, prompt.id);
      };
      if (const Json* found = log.Find(cache->name(), prompt.id); found != nullptr) {
        Result<Answer> answer = FromJson(*found, prompt.id);
        if (!answer.ok()) return answer.status();
        // Half a letter at the end is lost in JSON.
        answer.value().text = cache->Text(answer.value().tokens);
        row.push_back(std::move(answer.value()));
      } else {
        Result<std::optional<Answer>> answer = cache->Ask(prompt, go_on);
        if (!answer.ok()) return answer.status();
        if (!answer.value()) return answers;
        if (Status s = log.Add(cache->name(), prompt.id, ToJson(*answer.value())); !s.ok())
          return s;
        row.push_back(std::move(*answer.value()));
      }
      done += Work(prompt);
    }
    for (std::size_t i = 0; i < caches.size(); ++i) answers[i].push_back(std::move(row[i]));
    if (!progress(done / all, prompt.id)) break;
  }
  return answers;
}

Figure MeanOf(std::span<const double> values) {
  if (values.empty()) return {};
  const auto n = static_cast<double>(values.size());
  const double mean = std::accumulate(values.begin(), values.end(), 0.0) / n;
  double squares = 0;
  for (const double x : values) squares += (x - mean) * (x - mean);
  return {mean, n > 1 ? std::sqrt(squares / (n - 1) / n) : 0};
}

TaskScore ScoreAnswers(std::span<const Prompt> prompts, std::span<const Answer> answers,
                       std::span<const Answer> base) {
  TaskScore out;
  std::vector<BleuCounts> segments;
  std::vector<double> rouge, same, agreed;
  for (std::size_t i = 0; i < answers.size(); ++i) {
    const std::string &text = answers[i].text, &reference = base[i].text;
    segments.push_back(CountBleu(text, reference));
    rouge.push_back(RougeL(text, reference));
    const int first = FirstDifference(answers[i].tokens, base[i].tokens);
    out.first_diff.push_back(first);
    same.push_back(first < 0 ? 1 : 0);
    agreed.push_back(first < 0 ? static_cast<double>(base[i].tokens.size()) : first);
    out.scores.push_back(prompts[i].expected.empty() ? rouge.back()
                                                     : ScoreAnswer(prompts[i], text));
  }
  out.mean = MeanOf(out.scores);
  out.bleu = CorpusBleu(segments);
  out.rouge_l = MeanOf(rouge);
  out.same = MeanOf(same);
  out.first_diff_mean = MeanOf(agreed).value;
  return out;
}

}  // namespace kvtamp::tool
