// Experts: several MLPs in a layer, of which a router chooses a few for each row. Only the chosen ones are read.
//
// Rows are grouped by expert: the pairs of row and choice lie one expert after the other, so that a product takes all rows
// of an expert at once and reads its weights once. Knows weights, choices and their order; what is computed of them is
// the engine's business.
#pragma once

#include <algorithm>
#include <atomic>
#include <vector>

#include "product.h"

namespace gapless {

// T: of the router. E: of the experts.
template <class T, class E>
struct ExpertWeights {
    Linear<T> router;               // where experts are quantized, its bias alone
    float* router_table = nullptr;  // there its weights [logits][hidden_size], which files do not quantize
    std::vector<Linear<E>> gate_up, down;  // of each expert
};

// The choices of one step's rows. A phase of one unit calls `group`; until then rows may `choose` side by side.
class Choices {
  public:
    // num_shared: 1 where there is a shared expert, else 0
    void resize(int max_rows, int num_experts, int num_chosen, int num_shared, bool of_all) {
        num_experts_ = num_experts, num_chosen_ = num_chosen, num_shared_ = num_shared, of_all_ = of_all;
        num_pairs_ = num_chosen + num_shared;
        experts_.resize((long)max_rows * num_pairs_), places_.resize(experts_.size()), shares_.resize(experts_.size());
        const int num_all = num_experts + num_shared;
        starts_.resize(num_all + 1), gate_units_.resize(num_all + 1), down_units_.resize(num_all + 1);
    }

    // The experts with the largest logits, the largest first, of equal ones the first; and their shares. Behind them the
    // shared expert, if there is one: the logit after those of the experts is its gate's.
    void choose(int row, const float* logits) {
        int32_t* experts = experts_.data() + (long)row * num_pairs_;
        float* shares = shares_.data() + (long)row * num_pairs_;
        for (int i = 0; i < num_chosen_; i++) {
            int best = -1;
            for (int e = 0; e < num_experts_; e++) {
                const bool taken = std::find(experts, experts + i, e) != experts + i;
                if (!taken && (best < 0 || logits[e] > logits[best])) best = e;
            }
            experts[i] = best;
        }
        float total = 0.0f;
        const float most = logits[experts[0]];
        for (int i = 0; i < num_chosen_; i++) total += shares[i] = std::exp(logits[experts[i]] - most);
        if (of_all_) {
            total = 0.0f;
            for (int e = 0; e < num_experts_; e++) total += std::exp(logits[e] - most);
        }
        for (int i = 0; i < num_chosen_; i++) shares[i] /= total;
        if (num_shared_) {
            experts[num_chosen_] = num_experts_;
            shares[num_chosen_] = 1.0f / (1.0f + std::exp(-logits[num_experts_]));
        }
    }

    // Puts the pairs of `num_rows` rows into the order of their experts, and counts the units of both products. together:
    // panels of gate and up that belong together.
    template <class T, class E>
    void group(int num_rows, const ExpertWeights<T, E>& weights, int together, int num_threads) {
        std::fill(starts_.begin(), starts_.end(), 0);
        const long num_pairs = (long)num_rows * num_pairs_;
        for (long pair = 0; pair < num_pairs; pair++) starts_[experts_[pair] + 1]++;
        gate_units_[0] = down_units_[0] = 0;
        for (int e = 0; e < num_experts_ + num_shared_; e++) {
            const int count = starts_[e + 1];
            gate_units_[e + 1] = gate_units_[e] + Cut<E>(weights.gate_up[e], count, together, num_threads).num_units;
            down_units_[e + 1] = down_units_[e] + Cut<E>(weights.down[e], count, 1, num_threads).num_units;
            starts_[e + 1] += starts_[e];
        }
        std::vector<int32_t> next(starts_.begin(), starts_.end() - 1);
        for (long pair = 0; pair < num_pairs; pair++) places_[pair] = next[experts_[pair]]++;
        num_gate_units.store(gate_units_.back(), std::memory_order_relaxed);
        num_down_units.store(down_units_.back(), std::memory_order_relaxed);
    }

    int place(long pair) const { return places_[pair]; }  // of a pair among those of all experts
    float share(long pair) const { return shares_[pair]; }
    int start(int expert) const { return starts_[expert]; }
    int count(int expert) const { return starts_[expert + 1] - starts_[expert]; }

    // The expert that a unit belongs to, and the unit's number there.
    std::pair<int, int> gate_unit(int unit) const { return of_unit(gate_units_, unit); }
    std::pair<int, int> down_unit(int unit) const { return of_unit(down_units_, unit); }

    // Read by every thread before the phase, also by one that comes too late for it, so a different layer may write.
    std::atomic<int> num_gate_units{0}, num_down_units{0};

  private:
    static std::pair<int, int> of_unit(const std::vector<int32_t>& units, int unit) {
        const int expert = std::upper_bound(units.begin(), units.end(), unit) - units.begin() - 1;
        return {expert, unit - units[expert]};
    }

    int num_experts_ = 0, num_chosen_ = 0, num_shared_ = 0, num_pairs_ = 0;
    bool of_all_ = false;  // shares are of all experts, and those of the chosen do not add up to 1
    std::vector<int32_t> experts_, places_;  // [rows][pairs]
    std::vector<float> shares_;
    std::vector<int32_t> starts_, gate_units_, down_units_;  // of each expert, and the end
};

}  // namespace gapless
