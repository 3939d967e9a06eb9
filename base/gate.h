// Keeps two parties apart without a lock for the one that comes all the time.
//
// Host: calls that come one after the other, never two at once. A store and a load to get in.
// Guest: from any thread, now and then. Waits until the host is out, and the host for it: only
// then does either call the system.
#pragma once

#include <atomic>
#include <chrono>
#include <mutex>
#include <thread>

namespace kvtamp {

class Gate {
 public:
  class Host {
   public:
    explicit Host(Gate& gate) : gate_(gate) {
      for (;;) {
        gate_.host_in_.store(true);
        if (!gate_.guest_in_.load()) return;  // in one order for all: one of the two sees the other
        gate_.host_in_.store(false);
        std::lock_guard until_it_is_out(gate_.guests_);
      }
    }
    ~Host() { gate_.host_in_.store(false, std::memory_order_release); }
    Host(const Host&) = delete;
    Host& operator=(const Host&) = delete;

   private:
    Gate& gate_;
  };

  class Guest {
   public:
    explicit Guest(Gate& gate) : gate_(gate), one_at_a_time_(gate.guests_) {
      gate_.guest_in_.store(true);
      while (gate_.host_in_.load()) std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
    ~Guest() { gate_.guest_in_.store(false, std::memory_order_release); }
    Guest(const Guest&) = delete;
    Guest& operator=(const Guest&) = delete;

   private:
    Gate& gate_;
    std::lock_guard<std::mutex> one_at_a_time_;
  };

 private:
  std::atomic<bool> host_in_ = false, guest_in_ = false;
  std::mutex guests_;
};

}  // namespace kvtamp
