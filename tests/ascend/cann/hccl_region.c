/* Memory that ranks share: its creation, its address, and barriers that use it. */
#include "hccl.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/futex.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

/* Address of a region: the process that created it, and a file descriptor of that process. */
struct address {
    char magic[16];
    int32_t pid, fd;
    uint64_t inode;
};

static const char magic[16] = "simulated HCCL";

uint64_t hccl_deadline_ns(const char *setting, long fallback_seconds) {
    return sim_now_ns() + (uint64_t)sim_setting(setting, fallback_seconds, 1, 17340) * 1000000000u;
}

/* Waits until *word differs from `value`, for at most 50 ms. */
static void doze(atomic_uint *word, unsigned value) {
    struct timespec moment = {0, 50000000};
    syscall(SYS_futex, word, FUTEX_WAIT, value, &moment, NULL, 0);
}

static void wake(atomic_uint *word) { syscall(SYS_futex, word, FUTEX_WAKE, INT_MAX, NULL, NULL, 0); }

int hccl_new_region(HcclRootInfo *info) {
    int fd = memfd_create("hccl", MFD_CLOEXEC);
    struct stat status;
    if (fd < 0 || ftruncate(fd, sizeof(struct region)) || fstat(fd, &status))
        return sim_error(HCCL_E_MEMORY, "no shared memory: %s", strerror(errno));
    struct address address = {.pid = getpid(), .fd = fd, .inode = status.st_ino};
    memcpy(address.magic, magic, sizeof magic);
    memset(info, 0, sizeof *info);
    memcpy(info->internal, &address, sizeof address);
    return 0;
}

static struct region *map(const struct address *address, int *error) {
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/fd/%d", address->pid, address->fd);
    struct stat status;
    int fd = open(path, O_RDWR | O_CLOEXEC);
    if (fd < 0 || fstat(fd, &status) || status.st_ino != address->inode) {
        *error = sim_error(HCCL_E_TCP_CONNECT, "process %d, which has the root information, is not there", address->pid);
        if (fd >= 0) close(fd);
        return NULL;
    }
    void *region = mmap(NULL, sizeof(struct region), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    if (region != MAP_FAILED) return region;
    *error = sim_error(HCCL_E_MEMORY, "no shared memory: %s", strerror(errno));
    return NULL;
}

struct region *hccl_attach(const HcclRootInfo *info, uint32_t ranks, int *error) {
    struct address address;
    memcpy(&address, info->internal, sizeof address);
    if (memcmp(address.magic, magic, sizeof magic)) {
        *error = sim_error(HCCL_E_PARA, "this is no root information");
        return NULL;
    }
    struct region *region = map(&address, error);
    if (!region) return NULL;
    uint64_t deadline = hccl_deadline_ns("HCCL_CONNECT_TIMEOUT", 120);
    unsigned attached = atomic_fetch_add(&region->attached, 1) + 1;
    for (wake(&region->attached); attached < ranks; attached = atomic_load(&region->attached)) {
        if (sim_now_ns() > deadline) {
            *error = sim_error(HCCL_E_TIMEOUT, "%u of %u ranks have come within HCCL_CONNECT_TIMEOUT", attached, ranks);
            hccl_detach(region);
            return NULL;
        }
        doze(&region->attached, attached);
    }
    if (address.pid == getpid()) close(address.fd); /* all ranks have mapped the region */
    return region;
}

void hccl_detach(struct region *region) { munmap(region, sizeof *region); }

int hccl_fail(struct region *region, int error) {
    unsigned none = 0;
    atomic_compare_exchange_strong(&region->failed, &none, (unsigned)error);
    wake(&region->meetings);
    return error;
}

int hccl_meet(struct communicator *communicator) {
    struct region *region = communicator->region;
    unsigned meeting = atomic_load(&region->meetings);
    if (atomic_fetch_add(&region->arrived, 1) + 1 == communicator->ranks) {
        atomic_store(&region->arrived, 0);
        atomic_fetch_add(&region->meetings, 1);
        wake(&region->meetings);
    }
    uint64_t deadline = hccl_deadline_ns("HCCL_EXEC_TIMEOUT", 1836);
    while (atomic_load(&region->meetings) == meeting) {
        unsigned failed = atomic_load(&region->failed);
        if (failed) return sim_error((int)failed, "another rank has failed, code %u", failed);
        if (sim_now_ns() > deadline)
            return hccl_fail(region, sim_error(HCCL_E_TIMEOUT, "EI0002: rank %u has waited for the others for HCCL_EXEC_TIMEOUT",
                                               communicator->rank));
        doze(&region->meetings, meeting);
    }
    return 0;
}
