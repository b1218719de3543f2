// One direction of a GPU's link: a fluid in bins of time, so that transfers may be entered in any order of their starts.
#pragma once

#include <algorithm>
#include <cstddef>
#include <vector>

namespace entwine::simulate {

class Link {
 public:
  explicit Link(double bytes_per_us) : rate_(bytes_per_us) {}

  // Moves `bytes` from `us` on, `most` a microsecond at most, through what earlier transfers leave free. Returns when the last
  // byte has left.
  double move(double us, double bytes, double most) {
    most = std::min(most, rate_);
    bytes_ += bytes;
    size_t bin = std::max(static_cast<size_t>(us / kBin), full_);
    for (double end = us; bytes > 0; ++bin) {
      if (bin >= used_.size()) used_.resize(2 * bin + 64);
      double begin = std::max(us, bin * kBin), close = (bin + 1) * kBin;
      double taken = std::min({bytes, rate_ * kBin - used_[bin], most * (close - begin)});
      if (taken <= 0) continue;
      used_[bin] += taken;
      bytes -= taken;
      end = bytes > 0 ? close : std::min(close, std::max(begin + taken / most, bin * kBin + used_[bin] / rate_));
      if (bin == full_ && used_[bin] >= rate_ * kBin * 0.999) ++full_;
      if (bytes <= 1e-6) return end;
    }
    return us;
  }
  double busy_us() const { return bytes_ / rate_; }
  static constexpr double kBin = 0.5;
  std::vector<double> const& bytes_by_bin() const { return used_; }

 private:
  double rate_, bytes_ = 0;
  size_t full_ = 0;  // bins before this one are full
  std::vector<double> used_;
};

}  // namespace entwine::simulate
