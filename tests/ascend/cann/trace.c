/* Calls to CANN functions: their numbers, the trace that ASCEND_SIM_TRACE requests, and the failures in ASCEND_SIM_FAIL. */
#include "sim.h"

#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

static pthread_mutex_t list_lock = PTHREAD_MUTEX_INITIALIZER;
static struct sim_function *functions;
static int trace_file = -1;
static atomic_bool ready;
static char *rules; /* comma-separated "name=code", "name=code@N" (only call N) or "name=code@N+" (from call N on) */
static _Thread_local char message[1024];

/* Resets the counters and settings of a forked process, whose environment may differ. */
static void start_anew(void) {
    pthread_mutex_init(&list_lock, NULL);
    atomic_store(&ready, false);
    sim_counts_reset();
    for (struct sim_function *function = functions; function; function = function->next) atomic_store(&function->calls, 0);
}

static void read_settings(void) {
    static bool registered;
    pthread_mutex_lock(&list_lock);
    if (!atomic_load(&ready)) {
        if (!registered) registered = !pthread_atfork(NULL, NULL, start_anew);
        const char *path = getenv("ASCEND_SIM_TRACE"), *fail = getenv("ASCEND_SIM_FAIL");
        if (trace_file >= 0) close(trace_file);
        trace_file = path && *path ? open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600) : -1;
        free(rules);
        rules = fail && *fail ? strdup(fail) : NULL;
        atomic_store(&ready, true);
    }
    pthread_mutex_unlock(&list_lock);
}

long sim_setting(const char *name, long fallback, long least, long most) {
    const char *text = getenv(name);
    if (!text || !*text) return fallback;
    char *end;
    errno = 0;
    long value = strtol(text, &end, 10);
    if (errno || *end || value < least || value > most) {
        fprintf(stderr, "%s=%s: a whole number from %ld to %ld is wanted\n", name, text, least, most);
        abort();
    }
    return value;
}

uint64_t sim_now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

/* Returns the code of the rule for call number `call` of `name`, or 0. list_lock must be held. */
static int injected(const char *name, long call) {
    size_t length = strlen(name);
    for (const char *rule = rules; rule && *rule;) {
        if (!strncmp(rule, name, length) && rule[length] == '=') {
            char *end;
            int code = (int)strtol(rule + length + 1, &end, 10);
            if (*end != '@') return code;
            long wanted = strtol(end + 1, &end, 10);
            if (call == wanted || (*end == '+' && call > wanted)) return code;
        }
        rule = strchr(rule, ',');
        if (rule) rule++;
    }
    return 0;
}

int sim_enter(struct sim_function *function, const char *format, ...) {
    if (!atomic_load(&ready)) read_settings();
    long call = atomic_fetch_add(&function->calls, 1) + 1;
    if (!atomic_exchange(&function->listed, true)) {
        pthread_mutex_lock(&list_lock);
        function->next = functions;
        functions = function;
        pthread_mutex_unlock(&list_lock);
    }
    int code = 0;
    if (rules) {
        pthread_mutex_lock(&list_lock);
        code = injected(function->name, call);
        pthread_mutex_unlock(&list_lock);
    }
    if (trace_file >= 0) {
        char line[400];
        uint64_t now = sim_now_ns();
        int n = snprintf(line, sizeof line, "%llu.%09llu %d %ld %s ", (unsigned long long)(now / 1000000000u),
                         (unsigned long long)(now % 1000000000u), getpid(), syscall(SYS_gettid), function->name);
        va_list arguments;
        va_start(arguments, format);
        n += vsnprintf(line + n, sizeof line - (size_t)n - 40, format, arguments);
        va_end(arguments);
        if (n > (int)sizeof line - 40) n = (int)sizeof line - 40;
        n += code ? snprintf(line + n, sizeof line - (size_t)n, " injected=%d\n", code) : snprintf(line + n, 2, "\n");
        if (write(trace_file, line, (size_t)n) < 0) trace_file = -1;
    }
    return code ? sim_error(code, "%s: failure injected, code %d", function->name, code) : 0;
}

int sim_error(int code, const char *format, ...) {
    char line[256];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(line, sizeof line, format, arguments);
    va_end(arguments);
    size_t length = strlen(message); /* messages are appended until aclGetRecentErrMsg reads them */
    if (!strstr(message, line)) snprintf(message + length, sizeof message - length, "%s%s", length ? "\n" : "", line);
    return code;
}

const char *aclGetRecentErrMsg(void) {
    static struct sim_function function = {.name = "aclGetRecentErrMsg"};
    sim_enter(&function, "%s", "");
    static _Thread_local char told[sizeof message];
    memcpy(told, message, sizeof told);
    *message = 0;
    return told;
}

SIM_EXPORT long sim_calls(const char *name) {
    long calls = 0;
    pthread_mutex_lock(&list_lock);
    for (struct sim_function *function = functions; function; function = function->next)
        if (!strcmp(function->name, name)) calls += atomic_load(&function->calls);
    pthread_mutex_unlock(&list_lock);
    return calls;
}

/* Replaces the rules of ASCEND_SIM_FAIL. An empty text removes all rules. The counters of calls continue. */
SIM_EXPORT void sim_fail(const char *text) {
    if (!atomic_load(&ready)) read_settings();
    pthread_mutex_lock(&list_lock);
    free(rules);
    rules = text && *text ? strdup(text) : NULL;
    pthread_mutex_unlock(&list_lock);
}
