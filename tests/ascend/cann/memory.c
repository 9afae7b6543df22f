/* Memory. Device memory is host memory that counts towards the limit of its device. A table contains the ranges of device
 * memory, pinned memory and registered memory. Freed memory is unmapped. When a copy runs, it looks up its ranges in the
 * table, so that a copy from freed memory causes an error of the stream instead of a crash of the process. */
#include "sim.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define PAGE 4096u
#define GRANULARITY (2u << 20) /* of memory from aclrtMallocPhysical: the size of a huge page on the device */

pthread_mutex_t sim_lock = PTHREAD_MUTEX_INITIALIZER;

static struct sim_range *ranges; /* sorted by address, without overlaps */
static size_t range_count, range_space;
static size_t used[SIM_MAX_DEVICES], peak[SIM_MAX_DEVICES];

static size_t round_up(size_t n, size_t unit) { return (n + unit - 1) / unit * unit; }

static size_t limit(void) { return (size_t)sim_setting("ASCEND_SIM_MEMORY_BYTES", 8L << 30, 1, 1L << 46); }

static size_t others(void) { return (size_t)sim_setting("ASCEND_SIM_OTHERS_BYTES", 0, 0, 1L << 46); }

/* Returns the index of the first range that ends after p. */
static size_t find(const char *p) {
    size_t low = 0, high = range_count;
    while (low < high) {
        size_t middle = (low + high) / 2;
        if (ranges[middle].start + ranges[middle].size > p) high = middle;
        else low = middle + 1;
    }
    return low;
}

struct sim_range sim_range_of(const void *p, size_t n) {
    size_t at = find(p);
    if (at == range_count || ranges[at].start > (const char *)p) return (struct sim_range){.kind = SIM_FREE};
    struct sim_range range = ranges[at];
    while (range.start + range.size < (const char *)p + n) { /* aclrtMapMem maps memory in pieces */
        struct sim_range *next = ++at < range_count ? &ranges[at] : NULL;
        if (!next || next->start != range.start + range.size || next->kind != range.kind || next->device != range.device)
            return (struct sim_range){.kind = SIM_FREE};
        range.size += next->size;
    }
    return range;
}

static bool overlaps(const char *p, size_t n) {
    size_t at = find(p);
    return at < range_count && ranges[at].start < p + n;
}

static void add_range(struct sim_range range) {
    if (range_count == range_space) {
        range_space = range_space ? 2 * range_space : 64;
        ranges = realloc(ranges, range_space * sizeof *ranges);
        if (!ranges) abort();
    }
    size_t at = find(range.start);
    memmove(ranges + at + 1, ranges + at, (range_count - at) * sizeof *ranges);
    ranges[at] = range;
    range_count++;
}

/* Removes and returns the range of `kind` that starts at p, or returns SIM_FREE. */
static struct sim_range take_range(const void *p, enum sim_kind kind) {
    size_t at = find(p);
    if (at == range_count || ranges[at].start != p || ranges[at].kind != kind) return (struct sim_range){.kind = SIM_FREE};
    struct sim_range range = ranges[at];
    range_count--;
    memmove(ranges + at, ranges + at + 1, (range_count - at) * sizeof *ranges);
    return range;
}

/* Fills device memory that has no contents yet with 0xFF: NaN or -1. The size is limited, because written pages need real
 * memory. */
void sim_poison(void *start, size_t size) {
    size_t most = (size_t)sim_setting("ASCEND_SIM_POISON_BYTES", 32L << 20, 0, 1L << 46);
    memset(start, 0xff, size < most ? size : most);
}

static int charge(int device, size_t size) {
    if (used[device] + size > limit())
        return sim_error(ACL_ERROR_RT_MEMORY_ALLOCATION, "device %d: %zu bytes wanted, %zu of %zu are in use", device, size,
                         used[device], limit());
    used[device] += size;
    if (used[device] > peak[device]) peak[device] = used[device];
    return 0;
}

static int allocate(void **p, size_t size, enum sim_kind kind) {
    int device = sim_current_device();
    if (kind == SIM_DEVICE && device < 0) return sim_error(ACL_ERROR_RT_CONTEXT_NULL, "no device was set in this thread");
    if (!size) return sim_error(ACL_ERROR_RT_PARAM_INVALID, "an allocation of 0 bytes");
    size = round_up(size, PAGE);
    pthread_mutex_lock(&sim_lock);
    int code = kind == SIM_DEVICE ? charge(device, size) : 0;
    if (!code) {
        /* Untouched pages need no real memory, so a small machine can simulate a large device. */
        void *start = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (start == MAP_FAILED) {
            if (kind == SIM_DEVICE) used[device] -= size;
            code = sim_error(ACL_ERROR_RT_MEMORY_ALLOCATION, "mmap of %zu bytes: %s", size, strerror(errno));
        } else {
            if (kind == SIM_DEVICE) sim_poison(start, size);
            add_range((struct sim_range){start, size, kind, device});
            *p = start;
        }
    }
    pthread_mutex_unlock(&sim_lock);
    return code;
}

static int release(void *p, enum sim_kind kind) {
    pthread_mutex_lock(&sim_lock);
    struct sim_range range = take_range(p, kind);
    if (range.kind == SIM_DEVICE) used[range.device] -= range.size;
    if (range.kind != SIM_FREE) sim_forget(range.start, range.size);
    pthread_mutex_unlock(&sim_lock);
    if (range.kind == SIM_FREE) return sim_error(ACL_ERROR_RT_PARAM_INVALID, "%p was not allocated", p);
    munmap(range.start, range.size);
    return 0;
}

aclError aclrtMalloc(void **p, size_t size, aclrtMemMallocPolicy policy) {
    CALLED("size=%zu policy=%d device=%d", size, (int)policy, sim_current_device());
    return allocate(p, size, SIM_DEVICE);
}

aclError aclrtMallocAlign32(void **p, size_t size, aclrtMemMallocPolicy policy) {
    CALLED("size=%zu policy=%d device=%d", size, (int)policy, sim_current_device());
    return allocate(p, size, SIM_DEVICE);
}

aclError aclrtFree(void *p) {
    CALLED("p=%p", p);
    return release(p, SIM_DEVICE);
}

aclError aclrtMallocHost(void **p, size_t size) {
    CALLED("size=%zu", size);
    return allocate(p, size, SIM_PINNED);
}

aclError aclrtMallocHostWithCfg(void **p, uint64_t size, aclrtMallocConfig *config) {
    CALLED("size=%zu", (size_t)size);
    (void)config;
    return allocate(p, size, SIM_PINNED);
}

aclError aclrtFreeHost(void *p) {
    CALLED("p=%p", p);
    return release(p, SIM_PINNED);
}

aclError aclrtGetMemInfo(aclrtMemAttr attribute, size_t *free_bytes, size_t *total) {
    CALLED("attribute=%d", (int)attribute);
    int device = sim_current_device();
    if (device < 0) return sim_error(ACL_ERROR_RT_CONTEXT_NULL, "no device was set in this thread");
    pthread_mutex_lock(&sim_lock);
    *total = limit();
    *free_bytes = limit() > used[device] + others() ? limit() - used[device] - others() : 0;
    pthread_mutex_unlock(&sim_lock);
    return 0;
}

/* Current and largest number of bytes that this process uses on a device. */
SIM_EXPORT size_t sim_memory_used(int device) { return used[device]; }
SIM_EXPORT size_t sim_memory_peak(int device) { return peak[device]; }

/* Zeroes device memory, and gives whole pages back to the kernel. */
void sim_zero(void *p, size_t n) {
    char *start = p, *stop = start + n;
    char *first = (char *)round_up((uintptr_t)start, PAGE), *last = (char *)((uintptr_t)stop / PAGE * PAGE);
    if (n < (1u << 20) || madvise(first, (size_t)(last - first), MADV_DONTNEED)) {
        memset(start, 0, n);
        return;
    }
    memset(start, 0, (size_t)(first - start));
    memset(last, 0, (size_t)(stop - last));
}

/* Returns whether this process maps the whole range. */
static bool is_mapped(const void *p, size_t n) {
    char *page = (char *)((uintptr_t)p / PAGE * PAGE), *stop = (char *)p + n;
    unsigned char resident[1024];
    for (; page < stop; page += sizeof resident * PAGE) {
        size_t left = (size_t)(stop - page);
        if (mincore(page, left < sizeof resident * PAGE ? left : sizeof resident * PAGE, resident)) return false;
    }
    return true;
}

enum sim_kind sim_kind_of(const void *p, size_t n) {
    pthread_mutex_lock(&sim_lock);
    enum sim_kind kind = sim_range_of(p, n).kind;
    pthread_mutex_unlock(&sim_lock);
    return kind;
}

/* ---- host memory allocated elsewhere ---- */

static size_t page_bytes(void) { return (size_t)sim_setting("ASCEND_SIM_PAGE_BYTES", PAGE, PAGE, 1L << 30); }

/* Registers memory as CANN's documents of aclrtHostRegisterV2 say. `mapped` memory consists of whole pages. */
static int register_host(void *p, uint64_t size, bool mapped) {
    if (!sim_registers_memory()) return sim_error(ACL_ERROR_RT_FEATURE_NOT_SUPPORT, "this product cannot register host memory");
    if (!p || !size) return sim_error(ACL_ERROR_RT_PARAM_INVALID, "an empty range");
    if (mapped && ((uintptr_t)p % page_bytes() || size % page_bytes()))
        return sim_error(ACL_ERROR_RT_DRV_INTERNAL_ERROR, "%zu bytes at %p are not whole pages of %zu bytes", (size_t)size, p, page_bytes());
    if (!is_mapped(p, size)) return sim_error(ACL_ERROR_RT_DRV_INTERNAL_ERROR, "%p: not all of %zu bytes are mapped", p, (size_t)size);
    pthread_mutex_lock(&sim_lock);
    size_t registered = 0;
    for (size_t i = 0; i < range_count; i++) registered += ranges[i].kind == SIM_REGISTERED ? ranges[i].size : 0;
    size_t most = (size_t)sim_setting("ASCEND_SIM_REGISTER_BYTES", 200L << 30, 0, 1L << 46);
    int code = overlaps(p, size) ? sim_error(ACL_ERROR_HOST_MEMORY_ALREADY_REGISTERED, "%p is registered already", p) : 0;
    if (!code && registered + size > most)
        code = sim_error(ACL_ERROR_RT_MEMORY_ALLOCATION, "%zu bytes to register, %zu of %zu are registered", (size_t)size, registered, most);
    if (!code) add_range((struct sim_range){p, size, SIM_REGISTERED, -1});
    pthread_mutex_unlock(&sim_lock);
    return code;
}

aclError aclrtHostRegisterV2(void *p, uint64_t size, uint32_t flags) {
    CALLED("p=%p size=%zu flags=0x%x", p, (size_t)size, flags);
    return register_host(p, size, flags & ACL_HOST_REG_MAPPED);
}

aclError aclrtHostRegister(void *p, uint64_t size, aclrtHostRegisterType type, void **device_p) {
    CALLED("p=%p size=%zu type=%d", p, (size_t)size, (int)type);
    *device_p = p;
    return register_host(p, size, true);
}

aclError aclrtHostGetDevicePointer(void *p, void **device_p, uint32_t flags) {
    CALLED("p=%p flags=%u", p, flags);
    pthread_mutex_lock(&sim_lock);
    enum sim_kind kind = sim_range_of(p, 1).kind;
    pthread_mutex_unlock(&sim_lock);
    *device_p = p;
    return kind == SIM_REGISTERED ? 0 : sim_error(ACL_ERROR_HOST_MEMORY_NOT_REGISTERED, "%p is not registered", p);
}

aclError aclrtHostUnregister(void *p) {
    CALLED("p=%p", p);
    pthread_mutex_lock(&sim_lock);
    struct sim_range range = take_range(p, SIM_REGISTERED);
    if (range.kind != SIM_FREE) sim_forget(range.start, range.size);
    pthread_mutex_unlock(&sim_lock);
    return range.kind == SIM_FREE ? sim_error(ACL_ERROR_HOST_MEMORY_NOT_REGISTERED, "%p is not registered", p) : 0;
}

aclError aclrtPointerGetAttributes(const void *p, aclrtPtrAttributes *attributes) {
    CALLED("p=%p", p);
    pthread_mutex_lock(&sim_lock);
    struct sim_range range = sim_range_of(p, 1);
    pthread_mutex_unlock(&sim_lock);
    memset(attributes, 0, sizeof *attributes);
    attributes->location.type = range.kind == SIM_DEVICE ? ACL_MEM_LOCATION_TYPE_DEVICE
                                : range.kind == SIM_FREE ? ACL_MEM_LOCATION_TYPE_UNREGISTERED
                                                         : ACL_MEM_LOCATION_TYPE_HOST;
    attributes->location.id = range.kind == SIM_DEVICE ? (uint32_t)range.device : 0;
    attributes->pageSize = (uint32_t)page_bytes();
    return 0;
}

/* ---- synchronous copies ---- */

/* CANN documents exceptions up to Linux 5.10 for registered memory, whose pages the kernel may move. */
static bool kernel_moves_pages(void) {
    const char *kernel = getenv("ASCEND_SIM_KERNEL");
    int major, minor;
    return kernel && sscanf(kernel, "%d.%d", &major, &minor) == 2 && (major < 5 || (major == 5 && minor <= 10));
}

int sim_move(void *dst, enum sim_kind dst_kind, const void *src, enum sim_kind src_kind, size_t n) {
    if ((dst_kind == SIM_REGISTERED || src_kind == SIM_REGISTERED) && kernel_moves_pages())
        return sim_error(ACL_ERROR_RT_SYS_DMA, "a copy from or to registered memory on this release of Linux");
    if (sim_kind_of(dst, n) != dst_kind || (dst_kind == SIM_FREE && !is_mapped(dst, n)))
        return sim_error(ACL_ERROR_RT_SYS_DMA, "%zu bytes at %p were freed before a copy to them had run", n, dst);
    if (sim_kind_of(src, n) != src_kind || (src_kind == SIM_FREE && !is_mapped(src, n)))
        return sim_error(ACL_ERROR_RT_SYS_DMA, "%zu bytes at %p were freed before a copy of them had run", n, src);
    memmove(dst, src, n);
    return 0;
}

static bool on_device(aclrtMemcpyKind kind, bool target) {
    if (kind == ACL_MEMCPY_HOST_TO_HOST) return false;
    if (kind == ACL_MEMCPY_HOST_TO_DEVICE || kind == ACL_MEMCPY_HOST_TO_BUF_TO_DEVICE) return target;
    if (kind == ACL_MEMCPY_DEVICE_TO_HOST) return !target;
    return true;
}

int sim_check_copy(const void *dst, size_t room, const void *src, size_t n, aclrtMemcpyKind kind) {
    if (n > room) return sim_error(ACL_ERROR_RT_PARAM_INVALID, "a copy of %zu bytes to %zu", n, room);
    if (kind == ACL_MEMCPY_DEFAULT) return 0;
    pthread_mutex_lock(&sim_lock);
    bool wrong_dst = on_device(kind, true) != (sim_range_of(dst, n).kind == SIM_DEVICE);
    bool wrong_src = on_device(kind, false) != (sim_range_of(src, n).kind == SIM_DEVICE);
    pthread_mutex_unlock(&sim_lock);
    if (wrong_dst || wrong_src)
        return sim_error(ACL_ERROR_RT_PARAM_INVALID, "a copy of kind %d of %zu bytes from %p to %p: the %s is not such memory",
                         (int)kind, n, src, dst, wrong_dst ? "target" : "source");
    return 0;
}

aclError aclrtMemcpy(void *dst, size_t room, const void *src, size_t n, aclrtMemcpyKind kind) {
    CALLED("dst=%p src=%p n=%zu kind=%d", dst, src, n, (int)kind);
    int code = sim_check_copy(dst, room, src, n, kind);
    if (code) return code;
    pthread_mutex_lock(&sim_lock);
    code = sim_refuse_in_capture(ACL_ERROR_RT_CAPTURE_MODE_NOT_SUPPORT, "a copy that the host waits for");
    if (!code) code = sim_note_host(src, n, false);
    if (!code) code = sim_note_host(dst, n, true);
    sim_host_waits_until(sim_host_calls(SIM_CALL_COPY) + sim_bus_ns(n));
    pthread_mutex_unlock(&sim_lock);
    if (code) return code;
    sim_count_copy(kind, true);
    memmove(dst, src, n);
    return 0;
}

aclError aclrtMemset(void *p, size_t room, int32_t value, size_t n) {
    CALLED("p=%p value=%d n=%zu", p, value, n);
    if (n > room) return sim_error(ACL_ERROR_RT_PARAM_INVALID, "%zu bytes of %zu", n, room);
    memset(p, value, n);
    return 0;
}

/* ---- separate addresses and physical memory, for torch_npu's expandable segments ---- */

struct physical {
    size_t size;
    int device;
};

aclError aclrtReserveMemAddress(void **p, size_t size, size_t alignment, void *wish, uint64_t flags) {
    CALLED("size=%zu alignment=%zu wish=%p flags=%llu", size, alignment, wish, (unsigned long long)flags);
    /* A page before the range keeps the length for aclrtReleaseMemAddress. */
    char *start = mmap(NULL, size + 2 * GRANULARITY, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (start == MAP_FAILED) return sim_error(ACL_ERROR_RT_MEMORY_ALLOCATION, "%zu bytes of addresses", size);
    char *range = (char *)round_up((uintptr_t)start + PAGE, GRANULARITY);
    mprotect(range - PAGE, PAGE, PROT_READ | PROT_WRITE);
    ((uintptr_t *)(range - PAGE))[0] = (uintptr_t)start;
    ((uintptr_t *)(range - PAGE))[1] = size + 2 * GRANULARITY;
    *p = range;
    return 0;
}

aclError aclrtReleaseMemAddress(void *p) {
    CALLED("p=%p", p);
    uintptr_t *head = (uintptr_t *)((char *)p - PAGE);
    munmap((void *)head[0], head[1]);
    return 0;
}

aclError aclrtMallocPhysical(aclrtDrvMemHandle *handle, size_t size, const aclrtPhysicalMemProp *properties, uint64_t flags) {
    int device = (int)properties->location.id;
    CALLED("size=%zu device=%d flags=%llu", size, device, (unsigned long long)flags);
    if (device < 0 || device >= sim_device_count()) return sim_error(ACL_ERROR_RT_INVALID_DEVICEID, "device %d", device);
    pthread_mutex_lock(&sim_lock);
    int code = charge(device, size);
    pthread_mutex_unlock(&sim_lock);
    if (code) return code;
    struct physical *physical = malloc(sizeof *physical);
    if (!physical) abort();
    *physical = (struct physical){size, device};
    *handle = physical;
    return 0;
}

aclError aclrtFreePhysical(aclrtDrvMemHandle handle) {
    CALLED("handle=%p", handle);
    struct physical *physical = handle;
    pthread_mutex_lock(&sim_lock);
    used[physical->device] -= physical->size;
    pthread_mutex_unlock(&sim_lock);
    free(physical);
    return 0;
}

aclError aclrtMapMem(void *p, size_t size, size_t offset, aclrtDrvMemHandle handle, uint64_t flags) {
    CALLED("p=%p size=%zu offset=%zu handle=%p flags=%llu", p, size, offset, handle, (unsigned long long)flags);
    struct physical *physical = handle;
    int protection = PROT_READ | PROT_WRITE, how = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED;
    if (size > physical->size || mmap(p, size, protection, how, -1, 0) == MAP_FAILED)
        return sim_error(ACL_ERROR_RT_PARAM_INVALID, "%zu bytes at %p", size, p);
    sim_poison(p, size);
    pthread_mutex_lock(&sim_lock);
    add_range((struct sim_range){p, size, SIM_DEVICE, physical->device});
    pthread_mutex_unlock(&sim_lock);
    return 0;
}

aclError aclrtUnmapMem(void *p) {
    CALLED("p=%p", p);
    pthread_mutex_lock(&sim_lock);
    struct sim_range range = take_range(p, SIM_DEVICE);
    if (range.kind != SIM_FREE) sim_forget(range.start, range.size);
    pthread_mutex_unlock(&sim_lock);
    if (range.kind == SIM_FREE) return sim_error(ACL_ERROR_RT_PARAM_INVALID, "%p is not mapped", p);
    mmap(p, range.size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    return 0;
}
