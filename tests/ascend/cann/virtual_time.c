/* Virtual time. The host's clock advances by fixed costs of calls, and the device's by the bytes and operations of its work.
 * The time that passes on the wall has no effect. Each thread has a host clock. It starts at the latest time of the others. */
#include "sim.h"

#include <stdlib.h>
#include <string.h>

struct costs {
    bool on;
    long launch, copy, sync, event;            /* ns of the host for a call */
    long kernel, link;                         /* ns of the device that each kernel or collective takes at least */
    long memory, products, bus, interconnect; /* bytes, floating-point operations, bytes and bytes in a microsecond */
};

static const struct costs *costs(void) {
    static struct costs costs;
    static bool read;
    if (read) return &costs;
    costs.on = sim_setting("ASCEND_SIM_CLOCK", 0, 0, 1);
    costs.launch = sim_setting("ASCEND_SIM_LAUNCH_NS", 30000, 0, 1L << 40);
    costs.copy = sim_setting("ASCEND_SIM_COPY_NS", 10000, 0, 1L << 40);
    costs.sync = sim_setting("ASCEND_SIM_SYNC_NS", 10000, 0, 1L << 40);
    costs.event = sim_setting("ASCEND_SIM_EVENT_NS", 2000, 0, 1L << 40);
    costs.kernel = sim_setting("ASCEND_SIM_KERNEL_NS", 3000, 0, 1L << 40);
    costs.link = sim_setting("ASCEND_SIM_LINK_NS", 10000, 0, 1L << 40);
    costs.memory = sim_setting("ASCEND_SIM_MEMORY_BYTES_PER_US", 1200000, 1, 1L << 40);
    costs.products = sim_setting("ASCEND_SIM_FLOPS_PER_US", 280000000, 1, 1L << 50);
    costs.bus = sim_setting("ASCEND_SIM_BUS_BYTES_PER_US", 20000, 1, 1L << 40);
    costs.interconnect = sim_setting("ASCEND_SIM_LINK_BYTES_PER_US", 25000, 1, 1L << 40);
    read = true;
    return &costs;
}

static _Thread_local uint64_t host;
static _Thread_local bool started;
static uint64_t latest; /* of all threads; sim_lock protects it */

static uint64_t larger(uint64_t a, uint64_t b) { return a > b ? a : b; }

static void move_host(uint64_t to) {
    if (!started) host = larger(host, latest);
    started = true;
    host = larger(host, to);
    latest = larger(latest, host);
}

static uint64_t spend(uint64_t ns) {
    move_host(0);
    if (costs()->on) move_host(host + ns);
    return host;
}

uint64_t sim_host_calls(enum sim_call call) {
    const struct costs *each = costs();
    return spend((uint64_t)(call == SIM_CALL_LAUNCH ? each->launch
                            : call == SIM_CALL_COPY ? each->copy
                            : call == SIM_CALL_SYNC ? each->sync
                                                    : each->event));
}

uint64_t sim_host_now(void) { return spend(0); }

void sim_host_waits_until(uint64_t ns) { move_host(ns); }

bool sim_host_is_past(uint64_t ns) {
    move_host(0);
    return host >= ns;
}

uint64_t sim_bus_ns(size_t bytes) { return costs()->on ? bytes * 1000 / (uint64_t)costs()->bus : 0; }

uint64_t sim_link_ns(size_t bytes) {
    return costs()->on ? (uint64_t)costs()->link + bytes * 1000 / (uint64_t)costs()->interconnect : 0;
}

/* Intervals in which a device computes or communicates, in the order in which they were added. */
static struct interval {
    uint64_t start, stop;
} *intervals[SIM_MAX_DEVICES];
static size_t counts[SIM_MAX_DEVICES], space[SIM_MAX_DEVICES];

static void note_busy(int device, uint64_t start, uint64_t stop) {
    size_t count = counts[device];
    struct interval *last = count ? &intervals[device][count - 1] : NULL;
    if (last && start == last->stop) {
        last->stop = stop;
        return;
    }
    if (count == space[device]) {
        space[device] = count ? 2 * count : 1024;
        intervals[device] = realloc(intervals[device], space[device] * sizeof *intervals[device]);
        if (!intervals[device]) abort();
    }
    intervals[device][counts[device]++] = (struct interval){start, stop};
}

uint64_t sim_take_time(const struct sim_task *task, int device) {
    if (task->busy && task->cost_ns) note_busy(device, task->start_ns, task->start_ns + task->cost_ns);
    return task->start_ns + task->cost_ns;
}

static int by_start(const void *one, const void *other) {
    uint64_t a = ((const struct interval *)one)->start, b = ((const struct interval *)other)->start;
    return a < b ? -1 : a > b;
}

/* ---- moments: the times at which streams reach records of events ---- */

struct sim_moment *sim_new_moment(void) {
    struct sim_moment *moment = calloc(1, sizeof *moment);
    if (!moment) abort();
    return sim_keep_moment(moment);
}

struct sim_moment *sim_keep_moment(struct sim_moment *moment) {
    if (moment) atomic_fetch_add(&moment->references, 1);
    return moment;
}

void sim_drop_moment(struct sim_moment *moment) {
    if (moment && atomic_fetch_sub(&moment->references, 1) == 1) free(moment);
}

/* ---- for operators in Python, and for tests ---- */

SIM_EXPORT bool sim_clock_is_on(void) { return costs()->on; }

static int run_kernel(struct sim_task *task) {
    (void)task;
    return 0;
}

static void drop_kernel(struct sim_task *task) { free(task); }

/* Queues a kernel that moves `bytes` and computes `operations`. An AI CPU is a hundredth as fast as the AI cores. */
SIM_EXPORT void sim_launch(void *stream, uint64_t bytes, uint64_t operations, bool on_aicpu) {
    const struct costs *each = costs();
    uint64_t moving = bytes * 1000 / (uint64_t)each->memory, computing = operations * 1000 / (uint64_t)each->products;
    pthread_mutex_lock(&sim_lock);
    struct sim_task *task = sim_new_task(sizeof *task, run_kernel, drop_kernel);
    task->busy = true;
    task->cost_ns = (uint64_t)each->kernel + larger(moving, computing) * (on_aicpu ? 100 : 1);
    sim_host_calls(SIM_CALL_LAUNCH);
    sim_queue(sim_stream_of(stream), task);
    pthread_mutex_unlock(&sim_lock);
}

SIM_EXPORT uint64_t sim_host_ns(void) {
    pthread_mutex_lock(&sim_lock);
    move_host(0);
    pthread_mutex_unlock(&sim_lock);
    return host;
}

/* Adds work of the calling thread. */
SIM_EXPORT void sim_host_work(uint64_t ns) {
    pthread_mutex_lock(&sim_lock);
    spend(ns);
    pthread_mutex_unlock(&sim_lock);
}

/* Returns the time in [from, to) during which the device computes or communicates. */
SIM_EXPORT uint64_t sim_busy_ns(int device, uint64_t from, uint64_t to) {
    pthread_mutex_lock(&sim_lock);
    qsort(intervals[device], counts[device], sizeof *intervals[device], by_start);
    uint64_t busy = 0, reached = from;
    for (size_t i = 0; i < counts[device]; i++) {
        uint64_t start = larger(intervals[device][i].start, reached), stop = intervals[device][i].stop;
        if (stop > to) stop = to;
        if (stop <= start) continue;
        busy += stop - start;
        reached = stop;
    }
    pthread_mutex_unlock(&sim_lock);
    return busy;
}
