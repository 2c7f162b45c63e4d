// The pool, the kernels and the tape, driven by several threads at once: results must be bitwise equal to one thread's.
// Built with the thread sanitizer, it also finds data races.
//
//     threads_test [fork | time]
//
// With `fork`, what a forked child can still do: neither the thread sanitizer nor an emulator supports threads there.
// With `time`, the overhead of a job for 1, 2, 4, ... threads; nothing is checked.
#include <sys/wait.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <memory>
#include <thread>
#include <vector>

#include "operands.hpp"
#include "operations.hpp"
#include "tape.hpp"
#include "threads.hpp"

namespace {

using namespace checks;

constexpr int POOL = 3;
constexpr int64_t ROUNDS = 300;

// Each body on its own thread; they count errors.
void in_callers(const std::vector<void (*)(Random&, std::atomic<int64_t>&)>& bodies, const char* promise) {
    std::atomic<int64_t> wrong{0};
    std::vector<std::thread> callers;
    for (size_t i = 0; i < bodies.size(); ++i)
        callers.emplace_back([&, i] {
            Random random(i + 1);
            bodies[i](random, wrong);
        });
    for (std::thread& caller : callers) caller.join();
    expect(wrong == 0, promise);
}

// Occasionally long enough for the pool's threads to fall asleep.
void pause(Random& random) {
    if (random.one_in(5)) std::this_thread::sleep_for(std::chrono::microseconds(random.between(0, 800)));
}

// ---- the pool -------------------------------------------------------------------------------------------------------

// Plain integers: a piece that runs twice, or is seen too late by the caller, is a wrong sum and a data race.
void count_pieces(Random& random, std::atomic<int64_t>& wrong) {
    for (int64_t round = 0; round < ROUNDS; ++round) {
        std::vector<int64_t> visits(size_t(random.between(0, 300)));
        int64_t* const first = visits.data();
        parallel(int64_t(visits.size()), random.between(1, 20), [](const void* job, int64_t begin, int64_t end) {
            for (int64_t i = begin; i < end; ++i) ++(*static_cast<int64_t* const*>(job))[i];
        }, &first);
        for (const int64_t visit : visits) wrong += visit != 1;
        pause(random);
    }
}

void change_threads(Random& random, std::atomic<int64_t>& wrong) {
    for (int64_t round = 0; round < ROUNDS / 10; ++round) {
        set_threads(int(random.between(1, 4)));
        wrong += threads() < 1 || threads() > 4;
        std::this_thread::sleep_for(std::chrono::microseconds(random.between(0, 3000)));
    }
}

// Announcements may name any memory: they change nothing but the contents of caches.
void announce_and_count(Random& random, std::atomic<int64_t>& wrong) {
    std::vector<uint8_t> weights(1 << 20);
    for (int64_t round = 0; round < ROUNDS / 10; ++round) {
        Coming coming;
        coming.count = int(random.between(0, Coming::MOST));
        coming.together = random.one_in(2);
        coming.piece = random.between(1, 5);
        const int64_t units = random.between(1, 40);
        for (int i = 0; i < coming.count; ++i) coming.runs[i] = {weights.data(), units, random.between(1, 100000)};
        if (random.one_in(4)) coming.runs[0].data = nullptr;
        announce(coming);
        std::vector<int64_t> visits(size_t(random.between(0, 300)));
        int64_t* const first = visits.data();
        parallel(int64_t(visits.size()), random.between(1, 20), [](const void* job, int64_t begin, int64_t end) {
            for (int64_t i = begin; i < end; ++i) ++(*static_cast<int64_t* const*>(job))[i];
        }, &first);
        for (const int64_t visit : visits) wrong += visit != 1;
    }
    announce({});
}

void check_pool() {
    set_threads(POOL);
    in_callers({count_pieces, count_pieces, count_pieces}, "every piece runs once with several callers");
    in_callers({count_pieces, announce_and_count, announce_and_count}, "every piece runs once with any announcement");
    in_callers({count_pieces, announce_and_count, change_threads}, "every piece runs once while the pool is replaced");
    set_threads(POOL);
}

// ---- a layer on a tape ----------------------------------------------------------------------------------------------

constexpr int64_t HIDDEN = 256, HEADS = 4, KV_HEADS = 2, SIZE = 64, WIDE = 512, VOCABULARY = 50, PAGE = 16, FRAMES = 20;

// Consecutive buffers, each for all tokens: nothing overlaps.
class Arena {
  public:
    Place floats(int64_t per_token) { return take(per_token * 4); }
    Place encoded(int64_t columns) { return take(encoded_stride(columns)); }
    int64_t per_token() const { return used_; }

  private:
    Place take(int64_t bytes) {
        const Place place{Place::ARENA, used_, 0};
        used_ += (bytes + 63) / 64 * 64;
        return place;
    }
    int64_t used_ = 0;
};

enum Inputs : int64_t { IDS, POSITIONS, SLOTS, STARTS, LENGTHS, TABLE, KEYS, VALUES, INPUTS };

Place fixed(const void* address) { return {Place::FIXED, int64_t(reinterpret_cast<uintptr_t>(address)), 0}; }
Place input(Inputs number) { return {Place::INPUT, number, 0}; }

// A Llama layer with packed weights. Each step has its own pages, so that several can run at once.
struct Layer {
    explicit Layer(Random random)
        : table(random, Q8_0, VOCABULARY, HIDDEN), norm(normals(random, HIDDEN)), frequencies(SIZE / 2) {
        for (int64_t i = 0; i < SIZE / 2; ++i) frequencies[i] = float(std::pow(10000.0, -2.0 * double(i) / double(SIZE)));
        Arena arena;
        const Place x = arena.floats(HIDDEN), joined = arena.floats(HIDDEN), branch = arena.floats(HIDDEN);
        const Place cos = arena.floats(SIZE / 2), sin = arena.floats(SIZE / 2), normed = arena.encoded(HIDDEN);
        const Place q = arena.floats(HEADS * SIZE), k = arena.floats(KV_HEADS * SIZE), v = arena.floats(KV_HEADS * SIZE);
        const Place hadamard = arena.encoded(HEADS * SIZE), gated = arena.encoded(WIDE);
        result = arena.floats(HIDDEN);
        per_token = arena.per_token();

        auto embedding = std::make_unique<EmbeddingStep>();
        embedding->ids = input(IDS), embedding->table = fixed(table.blocks.data()), embedding->y = x;
        embedding->format = Q8_0, embedding->count = VOCABULARY, embedding->columns = HIDDEN;
        embedding->row_bytes = table.row_bytes(), embedding->scale = 1.0f;
        tape.add(std::move(embedding), "embedding");
        auto angles = std::make_unique<AnglesStep>();
        angles->positions = input(POSITIONS), angles->frequencies = fixed(frequencies.data());
        angles->cos = cos, angles->sin = sin, angles->half = SIZE / 2, angles->scale = 1.0f;
        tape.add(std::move(angles), "angles");
        add_norm(x, {}, {}, normed);
        add_packed(random, normed, HIDDEN, {{Q4_K, HEADS * SIZE, q}, {Q4_K, KV_HEADS * SIZE, k}, {Q6_K, KV_HEADS * SIZE, v}});
        auto intake = std::make_unique<IntakeStep>();
        intake->q = intake->turned = q, intake->k = k, intake->v = v, intake->cos = cos, intake->sin = sin;
        intake->slots = input(SLOTS), intake->k_pages = pages(KEYS), intake->v_pages = pages(VALUES);
        intake->q_token = intake->turned_token = HEADS * SIZE, intake->k_token = intake->v_token = KV_HEADS * SIZE;
        intake->frames = FRAMES, intake->page_tokens = PAGE, intake->heads = HEADS, intake->kv_heads = KV_HEADS;
        intake->size = intake->values = SIZE, intake->half = SIZE / 2, intake->type = PAGES_BF16;
        static_cast<PackedStep&>(*tape.last()).intake = std::move(intake);
        auto attention = std::make_unique<AttentionStep>();
        attention->q = q, attention->encoded = hadamard, attention->q_start = input(STARTS);
        attention->kv_len = input(LENGTHS), attention->table = input(TABLE);
        attention->k_pages = pages(KEYS), attention->v_pages = pages(VALUES), attention->q_token = HEADS * SIZE;
        attention->frames = FRAMES, attention->page_tokens = PAGE, attention->heads = HEADS, attention->kv_heads = KV_HEADS;
        attention->size = attention->values = SIZE, attention->window = 0, attention->scale = 0.125f, attention->cap = 0.0f;
        attention->type = PAGES_BF16;
        tape.add(std::move(attention), "attention");
        add_packed(random, hadamard, HEADS * SIZE, {{Q5_K, HIDDEN, branch}});
        add_norm(x, branch, joined, normed);
        add_packed(random, normed, HIDDEN, {{Q4_0, WIDE, {}}, {Q8_0, WIDE, {}}}, SILU, gated);
        add_packed(random, gated, WIDE, {{Q3_K, HIDDEN, result}});
        tape.inputs = INPUTS;
    }

    static PagesAt pages(Inputs number) { return {input(number), {PAGE * KV_HEADS * SIZE, KV_HEADS * SIZE, SIZE}, {}, {}}; }

    void add_norm(Place x, Place delta, Place joined, Place encoded) {
        auto made = std::make_unique<NormStep>();
        made->x = x, made->delta = delta, made->joined = joined, made->weight = fixed(norm.data()), made->encoded = encoded;
        made->per_token = 1, made->columns = HIDDEN, made->eps = 1e-5f, made->offset = 0.0f;
        tape.add(std::move(made), "norm");
    }

    struct Part {
        int format;
        int64_t outputs;
        Place y;
    };

    void add_packed(Random& random, Place x, int64_t inner, const std::vector<Part>& parts, int gate = -1, Place encoded = {}) {
        auto made = std::make_unique<PackedStep>();
        made->x = x, made->encoded = encoded, made->inner = inner, made->gate = gate;
        for (const Part& part : parts) {
            weights.push_back(packed(Weight(random, part.format, part.outputs, inner)));
            made->parts.push_back({fixed(weights.back().data()), {}, {}, part.y, part.outputs, part.outputs, pack_of(part.format)});
        }
        tape.add(std::move(made), "packed");
    }

    Weight table;
    Array<float> norm, frequencies;
    std::vector<Array<uint8_t>> weights;
    Tape tape;
    Place result;
    int64_t per_token;
};

const Layer& layer() {
    static const Layer made{Random(7)};
    return made;
}

// Two sequences: a prefill in two steps, then some tokens one by one.
std::vector<float> run_layer(uint64_t seed) {
    Random random(seed);
    const Layer& of = layer();
    Array<uint16_t> keys(FRAMES * PAGE * KV_HEADS * SIZE), values(FRAMES * PAGE * KV_HEADS * SIZE);
    const int64_t width = FRAMES / 2;
    std::vector<int64_t> table, lengths(2, 0);
    for (int64_t i = 0; i < 2 * width; ++i) table.push_back(i % 2 * width + i / 2);
    std::vector<float> results;
    for (const int64_t more : {90, 1, 20, 1, 1}) {
        std::vector<int64_t> ids, positions, slots, starts{0};
        for (int64_t i = 0; i < 2; ++i) {
            for (int64_t j = 0; j < more; ++j, ++lengths[size_t(i)]) {
                const int64_t position = lengths[size_t(i)];
                ids.push_back(random.between(0, VOCABULARY - 1));
                positions.push_back(position);
                slots.push_back(table[size_t(i * width + position / PAGE)] * PAGE + position % PAGE);
            }
            starts.push_back(int64_t(ids.size()));
        }
        const auto from = [](const void* address) { return reinterpret_cast<uintptr_t>(address); };
        const Input inputs[INPUTS] = {{from(ids.data()), 0},    {from(positions.data()), 0}, {from(slots.data()), 0},
                                      {from(starts.data()), 0}, {from(lengths.data()), 0},   {from(table.data()), width},
                                      {from(keys.data()), 0},   {from(values.data()), 0}};
        const int64_t tokens = starts.back();
        Array<uint8_t> arena(of.per_token * tokens, 64);
        const Step step{tokens, 2, arena.data(), inputs};
        of.tape.replay(step, 0, int64_t(of.tape.instructions().size()), false);
        const float* result = of.result.in<float>(step);
        results.insert(results.end(), result, result + tokens * HIDDEN);
    }
    return results;
}

// ---- single operations ----------------------------------------------------------------------------------------------

std::vector<float> run_floats(uint64_t seed) {
    Random random(seed);
    const int64_t rows = random.between(1, 9);
    const Weight weight(random, Q6_K, 200, 256);
    const Array<float> x = normals(random, rows * weight.inner);
    std::vector<float> y(size_t(rows * weight.outputs));
    LinearJob job{};
    job.x = x.data(), job.x_stride = job.inner = weight.inner, job.weight = weight.blocks.data(), job.y = y.data();
    job.rows = rows, job.outputs = weight.outputs, job.row_bytes = weight.row_bytes();
    run_linear(job, Q6_K);
    return y;
}

std::vector<float> run_head(uint64_t seed) {
    Random random(seed);
    const int64_t rows = random.between(1, 4);
    const Weight weight(random, Q8_0, 1500, 64);
    const Array<uint8_t> packs = packed(weight);
    const Array<float> x = normals(random, rows * weight.inner);
    EncodedRows encoded(rows, weight.inner, Activations::Codes);
    EncodeJob encode{};
    encode.x = x.data(), encode.x_stride = encode.columns = weight.inner, encode.out = encoded.place();
    run_encode(encode, rows);
    PackedPart part{};
    part.weight = packs.data(), part.outputs = weight.outputs, part.pack = PACK8;
    PackedJob job{};
    job.x = encoded.place(), job.rows = rows, job.inner = weight.inner, job.parts = &part, job.count = 1, job.gate = -1;
    std::vector<int64_t> best(static_cast<size_t>(rows));
    run_packed_best(job, best.data());
    return {best.begin(), best.end()};
}

std::vector<float> run_scan(uint64_t seed) {
    Random random(seed);
    const int64_t tokens = 12, channels = 96, size = 16, q_start[] = {0, 5, tokens}, kept[] = {1, 1}, read[] = {0, 1};
    const int64_t write[] = {2, 3};
    const Array<float> x = normals(random, tokens * channels), a = normals(random, channels * size, -0.3f);
    const Array<float> b = normals(random, tokens * size), c = normals(random, tokens * size), d = normals(random, channels);
    Array<float> delta = normals(random, tokens * channels, 0.1f), state = normals(random, 4 * channels * size);
    std::vector<float> y(size_t(tokens * channels));
    RecurrentPlan plan{};
    plan.q_start = q_start, plan.kept = kept, plan.read = read, plan.write = write, plan.sequences = 2;
    plan.write_stride = 1, plan.channels = channels;
    ScanJob job{};
    job.plan = checked_plan(plan, 1, 4, tokens), job.x = x.data(), job.delta = delta.data(), job.a = a.data();
    job.b = b.data(), job.c = c.data(), job.d = d.data(), job.state = state.data(), job.y = y.data(), job.size = size;
    job.b_token = job.c_token = size;
    run_selective_scan(job, tokens);
    y.insert(y.end(), state.begin(), state.end());
    return y;
}

struct Computation {
    const char* name;
    std::vector<float> (*run)(uint64_t seed);
};

constexpr Computation COMPUTATIONS[] = {
    {"a layer on a tape", run_layer}, {"a linear layer", run_floats}, {"the best output", run_head}, {"a scan", run_scan}};
constexpr uint64_t SEEDS = 3;

std::vector<std::vector<float>> alone;  // single-threaded result per computation and seed

void compute(Random& random, std::atomic<int64_t>& wrong) {
    for (int64_t round = 0; round < ROUNDS / 10; ++round) {
        const size_t which = size_t(random.between(0, int64_t(std::size(COMPUTATIONS)) - 1));
        const uint64_t seed = uint64_t(random.between(0, SEEDS - 1));
        const std::vector<float> got = COMPUTATIONS[which].run(seed), &want = alone[which * SEEDS + seed];
        wrong += got.size() != want.size() || std::memcmp(got.data(), want.data(), got.size() * sizeof(float)) != 0;
        pause(random);
    }
}

void check_computations() {
    set_threads(1);
    alone.clear();
    for (const Computation& computation : COMPUTATIONS)
        for (uint64_t seed = 0; seed < SEEDS; ++seed) {
            alone.push_back(computation.run(seed));
            double size = 0;
            for (const float number : alone.back()) size += std::fabs(number);
            expect(std::isfinite(size) && size > 0, computation.name);
        }
    set_threads(POOL);
    in_callers({compute, compute, compute}, "results of several callers are bitwise equal to one thread's");
    in_callers({compute, compute, change_threads}, "results are bitwise equal while the pool is replaced");
    set_threads(POOL);
}

// A child has none of its parent's threads, and one of them may have held the lock.
void check_fork() {
    set_threads(POOL);
    const std::vector<float> want = run_floats(0);
    std::atomic<bool> done{false};
    std::thread busy([&] {
        Random random(1);
        std::atomic<int64_t> wrong{0};
        while (!done) count_pieces(random, wrong);
    });
    for (int i = 0; i < 5; ++i) {
        const pid_t child = fork();
        if (child == 0) {
            const std::vector<float> got = run_floats(0);
            _exit(got.size() == want.size() && std::memcmp(got.data(), want.data(), got.size() * 4) == 0 ? 0 : 3);
        }
        int status = -1;
        expect(child > 0 && waitpid(child, &status, 0) == child && status == 0, "a forked child computes");
    }
    done = true;
    busy.join();
}

// ---- the overhead of a job ------------------------------------------------------------------------------------------

// Microseconds of a job of this many pieces, each of which takes `work` of them.
double job_time(int64_t pieces, int work, int rounds, std::chrono::microseconds pause_before) {
    std::chrono::steady_clock::duration taken{};
    for (int i = 0; i < rounds; ++i) {
        if (pause_before.count()) std::this_thread::sleep_for(pause_before);
        const auto begun = std::chrono::steady_clock::now();
        parallel(pieces, 1, [](const void* job, int64_t, int64_t) {
            const auto until = std::chrono::steady_clock::now() + std::chrono::microseconds(*static_cast<const int*>(job));
            while (*static_cast<const int*>(job) && std::chrono::steady_clock::now() < until) {}
        }, &work);
        taken += std::chrono::steady_clock::now() - begun;
    }
    return std::chrono::duration<double, std::micro>(taken).count() / rounds;
}

void show_times() {
    for (int count = 1; count <= int(std::thread::hardware_concurrency()); count *= 2) {
        const std::chrono::microseconds none{0}, long_enough_to_sleep{5000};
        set_threads(count);
        job_time(count, 0, 2000, none);
        std::printf("%3d threads: a job of 1 empty piece each %6.2f us, of 6 %6.2f us; 4 pieces of 5 us each %6.2f us, "
                    "the same when all sleep %7.2f us\n",
                    count, job_time(count, 0, 20000, none), job_time(6 * count, 0, 20000, none),
                    job_time(4 * count, 5, 4000, none), job_time(4 * count, 5, 50, long_enough_to_sleep));
    }
}

}  // namespace

int main(int count, char** arguments) {
    if (count > 1 && std::string(arguments[1]) == "time") {
        show_times();
        return 0;
    }
    if (count > 1 && std::string(arguments[1]) == "fork") {
        Verdicts::all().begin("fork");
        check_fork();
        return Verdicts::all().report("threads_test fork");
    }
    Verdicts::all().begin("the pool");
    check_pool();
    for (const std::string& isa : available_isas()) {
        set_isa(isa);
        Verdicts::all().begin(isa);
        check_computations();
    }
    return Verdicts::all().report("threads_test");
}
