// What the plug-in tells: snapshots over all live buffers, the start-up line, the summary at exit.
#pragma once

#include <string>

namespace kvtamp::ggml_plugin {

class Buffer;

// Live buffers, for snapshots.
void Remember(Buffer* buffer);
void Forget(Buffer* buffer);
// The highest layer that has K in any of them, -1 if none.
int LastLayerWithK();
// A host that gives the layers of sliding windows a cache of their own makes it smaller than that of
// the model's other layers: one of the two has layer 0.
bool IsOfSlidingWindows(const Buffer& buffer);
// Keeps the fullest snapshot: called before a cache loses what it holds.
void RememberBeforeLoss();
// The same before a buffer goes, and what there is at the end of a run of such calls: buffers of
// one context go one by one.
void RememberBeforeEnd();
// There is work again, so what ended was not the last.
void NoteWork();

// JSON of the present state; the pointer lives until the next call on the same thread.
const char* StatsJsonNow();
// Once at exit: the summary to stderr and, when `stats` is set, the JSON file.
void ReportAtExit();

}  // namespace kvtamp::ggml_plugin
