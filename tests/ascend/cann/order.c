/* Who wrote a range of memory last, and whether whoever uses it next has waited for that: races are errors here.
 * Each stream counts its steps; a clock says up to which step of each stream something is known to come later. A stream has
 * a clock, an event keeps that of the moment when it was recorded, and the host has one of what it has waited for. */
#include "sim.h"

#include <stdlib.h>
#include <string.h>

struct access {
    char *start, *stop;
    int writer, reader; /* streams; -1: nobody */
    uint64_t written, read;
};

static struct access *accesses; /* by address, none overlaps */
static size_t count, space;
static struct sim_clock host;

static bool watching(void) {
    static int answer = -1;
    if (answer < 0) answer = (int)sim_setting("ASCEND_SIM_RACES", 1, 0, 1);
    return answer;
}

uint64_t sim_clock_of(const struct sim_clock *clock, int stream) {
    return (size_t)stream < clock->count ? clock->steps[stream] : 0;
}

void sim_clock_join(struct sim_clock *clock, const struct sim_clock *other) {
    if (clock->count < other->count) {
        clock->steps = realloc(clock->steps, other->count * sizeof *clock->steps);
        if (!clock->steps) abort();
        memset(clock->steps + clock->count, 0, (other->count - clock->count) * sizeof *clock->steps);
        clock->count = other->count;
    }
    for (size_t i = 0; i < other->count; i++)
        if (clock->steps[i] < other->steps[i]) clock->steps[i] = other->steps[i];
}

void sim_clock_set(struct sim_clock *clock, int stream, uint64_t step) {
    struct sim_clock longer = {calloc((size_t)stream + 1, sizeof *longer.steps), (size_t)stream + 1};
    if (!longer.steps) abort();
    longer.steps[stream] = step;
    sim_clock_join(clock, &longer);
    free(longer.steps);
}

void sim_host_has_waited(const struct sim_clock *clock) { sim_clock_join(&host, clock); }

struct sim_clock *sim_host_clock(void) { return &host; }

/* Index of the first access that ends behind p. */
static size_t find(const char *p) {
    size_t low = 0, high = count;
    while (low < high) {
        size_t middle = (low + high) / 2;
        if (accesses[middle].stop > p) high = middle;
        else low = middle + 1;
    }
    return low;
}

static void insert(size_t at, struct access access) {
    if (count == space) {
        space = space ? 2 * space : 256;
        accesses = realloc(accesses, space * sizeof *accesses);
        if (!accesses) abort();
    }
    memmove(accesses + at + 1, accesses + at, (count - at) * sizeof *accesses);
    accesses[at] = access;
    count++;
}

/* Makes p the border of an access, if it lies within one. */
static void split(char *p) {
    size_t at = find(p);
    if (at == count || accesses[at].start >= p) return;
    struct access first = accesses[at];
    first.stop = p;
    accesses[at].start = p;
    insert(at, first);
}

static void erase(char *start, char *stop) {
    split(start);
    split(stop);
    size_t from = find(start), to = from;
    while (to < count && accesses[to].start < stop) to++;
    memmove(accesses + from, accesses + to, (count - to) * sizeof *accesses);
    count -= to - from;
}

void sim_forget(const void *p, size_t n) { erase((char *)p, (char *)p + n); }

/* Takes out what the host has waited for: it comes before all that is queued from now on. */
static void prune(void) {
    static size_t enough = 1024;
    if (count < enough) return;
    size_t kept = 0;
    for (size_t i = 0; i < count; i++) {
        struct access *access = &accesses[i];
        bool written = access->writer < 0 || access->written <= sim_clock_of(&host, access->writer);
        bool read = access->reader < 0 || access->read <= sim_clock_of(&host, access->reader);
        if (!written || !read) accesses[kept++] = *access;
    }
    count = kept;
    enough = kept < 512 ? 1024 : 2 * kept;
}

static int race(const char *what, int stream, const struct access *access, const char *before, int other) {
    return sim_error(ACL_ERROR_RT_STREAM_CONTEXT, "race: stream %d %s %p, and has not waited for stream %d, which %s it", stream,
                     what, (void *)access->start, other, before);
}

/* Whether all that was done to the range before is known to `clock`, which is that of `stream` or (-1) the host's. */
static int check(const struct sim_clock *clock, int stream, const char *start, const char *stop, bool writes) {
    const char *what = writes ? "writes" : "reads";
    for (size_t at = find(start); at < count && accesses[at].start < stop; at++) {
        struct access *access = &accesses[at];
        if (access->writer >= 0 && access->writer != stream && sim_clock_of(clock, access->writer) < access->written)
            return race(what, stream, access, "wrote", access->writer);
        if (writes && access->reader >= 0 && access->reader != stream && sim_clock_of(clock, access->reader) < access->read)
            return race(what, stream, access, "reads", access->reader);
    }
    return 0;
}

int sim_note_write(struct sim_stream *stream, void *p, size_t n) {
    if (!watching() || !n) return 0;
    prune();
    char *start = p, *stop = start + n;
    int id = sim_stream_id(stream), code = check(sim_stream_clock(stream), id, start, stop, true);
    if (code) return code;
    erase(start, stop);
    insert(find(start), (struct access){start, stop, id, -1, sim_step(stream), 0});
    return 0;
}

int sim_note_read(struct sim_stream *stream, const void *p, size_t n) {
    if (!watching() || !n) return 0;
    prune();
    char *start = (char *)p, *stop = start + n;
    int id = sim_stream_id(stream), code = check(sim_stream_clock(stream), id, start, stop, false);
    if (code) return code;
    split(start);
    split(stop);
    uint64_t step = sim_step(stream);
    for (size_t at = find(start); start < stop; at++) { /* of one reader, the last, is kept: enough to show a mistake */
        if (at == count || accesses[at].start > start) {
            char *end = at == count || accesses[at].start > stop ? stop : accesses[at].start;
            insert(at, (struct access){start, end, -1, id, 0, step});
        } else {
            accesses[at].reader = id;
            accesses[at].read = step;
        }
        start = accesses[at].stop;
    }
    return 0;
}

/* The host itself, or a copy that blocks it, uses the range. */
int sim_note_host(const void *p, size_t n, bool writes) {
    if (!watching() || !n) return 0;
    int code = check(&host, -1, p, (const char *)p + n, writes);
    if (!code && writes) sim_forget(p, n);
    return code;
}

/* ---- for operators: what is launched on the stream reads or writes now ---- */

SIM_EXPORT int sim_reads(void *stream, const void *p, size_t n) {
    pthread_mutex_lock(&sim_lock);
    int code = sim_note_read(sim_stream_of(stream), p, n);
    pthread_mutex_unlock(&sim_lock);
    return code;
}

SIM_EXPORT int sim_writes(void *stream, void *p, size_t n) {
    pthread_mutex_lock(&sim_lock);
    int code = sim_note_write(sim_stream_of(stream), p, n);
    pthread_mutex_unlock(&sim_lock);
    return code;
}
