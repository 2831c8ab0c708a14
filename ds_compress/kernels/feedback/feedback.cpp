// State updates of feedbacks, one pass each, as feedback/reference.py specifies them.

#include "../native/calls.h"
#include "../simd/reduce.h"
#include "feedback_update.h"
#include "../simd/vectors.h"

namespace {

// As cpu.py declares them.
struct Message {
    void* values;
    int64_t bf16, n;
};

struct DeltaArguments {
    Message message;
    const float* state;
    double factor;
    void* y;
};

struct UpdateResidualArguments {
    Message message;
    const float* residual;
    void* sent;
    double scale, residual_decay, error_weight;
    float* next;
};

template <class Float>
bool delta(const Float* x, const float* state, float factor, int64_t n, Float* y) {
    const Floats most = Floats{} + to_float(largest(x));
    in_vectors(n, [&](int64_t i, int64_t count) {
        const Floats value = load_partial(x + i, count), change = value - load_partial(state + i, count) * factor;
        const Floats within = larger(smaller(change, most), -most);
        store_partial(within + (value - value), y + i, count);  // nan, where the value is not finite
    });
    return true;
}

template <class In, class Update>
bool update_residual(const In* x, const float* residual, const In* sent, Update update, int64_t n, float* next) {
    Ints most = {};
    in_vectors(n, [&](int64_t i, int64_t count) {
        const Floats before = load_partial(residual + i, count), total = update.sum(load_partial(x + i, count), before);
        const Floats updated = update.next(before, total, load_partial(sent + i, count));
        most = largest_of(most, updated);
        store_partial(updated, next + i, count);
    });
    return can_keep(most);
}

// work(x + begin, begin, how many values), by threads.
template <class F>
int64_t for_values(const Message& message, int threads, const F& work) {
    return in_parallel(message.n, threads, [&](int64_t begin, int64_t end) {
        return with_type(message.values, message.bf16, [&](auto* x) { return work(x + begin, begin, end - begin); });
    });
}

}  // namespace

extern "C" {

int64_t delta(const DeltaArguments& args, int threads) {
    return for_values(args.message, threads, [&](auto* x, int64_t begin, int64_t n) {
        return delta(x, args.state + begin, args.factor, n, static_cast<decltype(x)>(args.y) + begin);
    });
}

int64_t update_residual(const UpdateResidualArguments& args, int threads) {
    return for_values(args.message, threads, [&](auto* x, int64_t begin, int64_t n) {
        return with_scale(args.scale, [&](auto scale) {
            const WeightedErrorFeedback<decltype(scale)> update(scale, args.residual_decay, args.error_weight);
            const auto* sent = static_cast<decltype(x)>(args.sent) + begin;
            return update_residual(x, args.residual + begin, sent, update, n, args.next + begin);
        });
    });
}

}  // extern "C"
