/* Devices: their number and properties, and the current device of each thread. */
#include "sim.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static _Thread_local int current = -1;
static int default_device = -1;
static char contexts[SIM_MAX_DEVICES]; /* the address of a device's entry is the device's context */

int sim_device_count(void) {
    int devices = (int)sim_setting("ASCEND_SIM_DEVICES", 1, 0, SIM_MAX_DEVICES), visible = 0;
    const char *list = getenv("ASCEND_RT_VISIBLE_DEVICES"); /* devices after the first missing one are ignored */
    if (!list) return devices;
    while (*list) {
        char *end;
        long device = strtol(list, &end, 10);
        if (end == list || device < 0 || device >= devices) break;
        visible++;
        list = *end == ',' ? end + 1 : end;
    }
    return visible;
}

int sim_current_device(void) { return current < 0 ? default_device : current; }

/* The file at `path` may set the default device of threads: {"defaultDevice": {"default_device": "0"}}. */
aclError aclInit(const char *path) {
    CALLED("path=%s", path ? path : "");
    FILE *file = path ? fopen(path, "r") : NULL;
    if (!file) return 0;
    char text[1024];
    text[fread(text, 1, sizeof text - 1, file)] = 0;
    fclose(file);
    const char *found = strstr(text, "\"default_device\"");
    if (found && sscanf(found, "\"default_device\" : \"%d", &default_device) != 1) default_device = -1;
    return 0;
}

aclError aclrtGetDeviceCount(uint32_t *count) {
    CALLED("%s", "");
    *count = (uint32_t)sim_device_count();
    return *count ? 0 : sim_error(ACL_ERROR_RT_NO_DEVICE, "no device");
}

aclError aclrtSetDevice(int32_t device) {
    CALLED("device=%d", device);
    if (device < 0 || device >= sim_device_count())
        return sim_error(ACL_ERROR_RT_INVALID_DEVICEID, "device %d: there are %d", device, sim_device_count());
    current = device;
    return 0;
}

aclError aclrtResetDevice(int32_t device) {
    CALLED("device=%d", device);
    if (device == current) current = -1;
    return 0;
}

aclError aclrtGetDevice(int32_t *device) {
    CALLED("%s", "");
    *device = sim_current_device();
    if (*device < 0) return sim_error(ACL_ERROR_RT_CONTEXT_NULL, "no device was set in this thread");
    return 0;
}

aclError aclrtGetCurrentContext(aclrtContext *context) {
    CALLED("%s", "");
    if (sim_current_device() < 0) return sim_error(ACL_ERROR_RT_CONTEXT_NULL, "no device was set in this thread");
    *context = &contexts[sim_current_device()];
    return 0;
}

aclError aclrtSetCurrentContext(aclrtContext context) {
    CALLED("context=%p", context);
    char *entry = context;
    if (entry < contexts || entry >= contexts + SIM_MAX_DEVICES)
        return sim_error(ACL_ERROR_RT_CONTEXT_NULL, "%p is no context", context);
    current = (int)(entry - contexts);
    return 0;
}

aclError aclrtGetPrimaryCtxState(int32_t device, uint32_t *flags, int32_t *active) {
    CALLED("device=%d", device);
    if (flags) *flags = 0;
    if (active) *active = device == sim_current_device();
    return 0;
}

/* Returns the value of a setting, or `fallback` if it is not set. */
static const char *text(const char *setting, const char *fallback) {
    const char *value = getenv(setting);
    return value && *value ? value : fallback;
}

static const char *soc(void) { return text("ASCEND_SIM_SOC", "Ascend910B1"); }

/* Atlas A2 and A3 can. */
bool sim_registers_memory(void) { return !strncmp(soc(), "Ascend910B", 10) || !strncmp(soc(), "Ascend910_93", 12); }

const char *aclrtGetSocName(void) {
    static struct sim_function function = {.name = "aclrtGetSocName"};
    sim_enter(&function, "%s", "");
    return soc();
}

aclError aclrtDeviceCanAccessPeer(int32_t *can, int32_t device, int32_t peer) {
    CALLED("device=%d peer=%d", device, peer);
    *can = device != peer;
    return 0;
}

aclError aclrtGetDeviceInfo(uint32_t device, aclrtDevAttr attribute, int64_t *value) {
    CALLED("device=%u attribute=%d", device, (int)attribute);
    switch ((int)attribute) { /* an Ascend 910B1 has 24 cube cores, 48 vector cores and 192 MiB of L2 cache */
    case ACL_DEV_ATTR_AICPU_CORE_NUM: *value = 6; break;
    case ACL_DEV_ATTR_AICORE_CORE_NUM:
    case ACL_DEV_ATTR_CUBE_CORE_NUM: *value = 24; break;
    case ACL_DEV_ATTR_VECTOR_CORE_NUM: *value = 48; break;
    case ACL_DEV_ATTR_L2_CACHE_SIZE: *value = 192L << 20; break;
    case ACL_DEV_ATTR_TOTAL_GLOBAL_MEM_SIZE: *value = sim_setting("ASCEND_SIM_MEMORY_BYTES", 8L << 30, 1, 1L << 46); break;
    default: return sim_error(ACL_ERROR_RT_FEATURE_NOT_SUPPORT, "attribute %d", (int)attribute);
    }
    return 0;
}

aclError aclrtDeviceGetUuid(int32_t device, aclrtUuid *uuid) {
    CALLED("device=%d", device);
    memset(uuid, 0, sizeof *uuid);
    uuid->bytes[15] = (char)device;
    return 0;
}

aclError aclrtGetDeviceUtilizationRate(int32_t device, aclrtUtilizationInfo *rate) {
    CALLED("device=%d", device);
    rate->cubeUtilization = rate->vectorUtilization = rate->aicpuUtilization = rate->memoryUtilization = 0;
    return 0;
}

/* The driver has its own versions. The default for CANN is the release for torch_npu 2.13. */
static const char *version_of(bool driver) {
    return driver ? text("ASCEND_SIM_DRIVER", "25.5.1") : text("ASCEND_SIM_CANN", "9.1.0");
}

aclError aclsysGetVersionStr(char *package, char *version) {
    CALLED("package=%s", package);
    snprintf(version, ACL_PKG_VERSION_MAX_SIZE, "%s", version_of(!strcmp(package, "driver")));
    return 0;
}

aclError aclsysGetCANNVersion(aclCANNPackageName package, aclCANNPackageVersion *version) {
    CALLED("package=%d", (int)package);
    const char *number = version_of(package == ACL_PKG_NAME_DRIVER);
    memset(version, 0, sizeof *version);
    snprintf(version->version, sizeof version->version, "%s", number);
    sscanf(number, "%63[^.].%63[^.].%63s", version->majorVersion, version->minorVersion, version->releaseVersion);
    return 0;
}

/* These functions return the length of a compiler option's value, and the value. */
size_t aclGetCompileoptSize(aclCompileOpt option) {
    (void)option;
    return 16;
}

aclError aclGetCompileopt(aclCompileOpt option, char *value, size_t length) {
    CALLED("option=%d", (int)option);
    snprintf(value, length, "enable");
    return 0;
}
