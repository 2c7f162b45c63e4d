/* A preloaded library that records all changes to files below POWER_ROOT, in order, in the file POWER_TRACE.
 *
 * A record is its kind, an inode number, an offset, the lengths of two byte strings, and the strings; disk.py reads it.
 * The process may append its own records to the trace, each with one write. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

enum { MOST_FILES = 1 << 16 };
static unsigned char watched[MOST_FILES];
static pthread_mutex_t turn = PTHREAD_MUTEX_INITIALIZER;
static int trace = -1;
static const char *root;
static size_t root_length;

#define REAL(name, type, ...) \
    static type (*real)(__VA_ARGS__); \
    if (real == NULL) real = (type (*)(__VA_ARGS__))dlsym(RTLD_NEXT, #name)

static ssize_t write_trace(const struct iovec *parts, int count) {
    REAL(writev, ssize_t, int, const struct iovec *, int);
    return real(trace, parts, count);
}

static int open_unrecorded(const char *path, int flags, mode_t mode) {
    REAL(open64, int, const char *, int, ...);
    return real(path, flags, mode);
}

__attribute__((constructor)) static void begin(void) {
    const char *path = getenv("POWER_TRACE");
    root = getenv("POWER_ROOT");
    if (path == NULL || root == NULL) return;
    root_length = strlen(root);
    trace = open_unrecorded(path, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0600);
}

static int inside(const char *path) {
    return trace >= 0 && strncmp(path, root, root_length) == 0 && (path[root_length] == '/' || path[root_length] == 0);
}

static int is_watched(int file) { return trace >= 0 && file >= 0 && file < MOST_FILES && watched[file]; }

static void note(char kind, uint64_t inode, uint64_t offset, const void *first, size_t length, const char *second) {
    struct __attribute__((packed)) { char kind; uint64_t inode, offset; uint32_t first, second; } head = {
        kind, inode, offset, (uint32_t)length, (uint32_t)(second == NULL ? 0 : strlen(second))};
    struct iovec parts[] = {
        {&head, sizeof head}, {(void *)first, length}, {(void *)(second == NULL ? "" : second), head.second}};
    if (write_trace(parts, 3) != (ssize_t)(sizeof head + length + head.second)) abort();
}

static uint64_t inode_of(int file) {
    struct stat status;
    return fstat(file, &status) == 0 ? status.st_ino : 0;
}

static int opened(const char *path, int flags, mode_t mode) {
    if (!inside(path)) return open_unrecorded(path, flags, mode);
    pthread_mutex_lock(&turn);
    int was_there = access(path, F_OK) == 0;
    int file = open_unrecorded(path, flags, mode), failure = errno;
    if (file >= MOST_FILES) abort();
    if (file >= 0) {
        watched[file] = 1;
        if (!was_there) note('C', inode_of(file), 0, path, strlen(path), NULL);
        else if (flags & O_TRUNC) note('T', inode_of(file), 0, NULL, 0, NULL);
    }
    pthread_mutex_unlock(&turn);
    errno = failure;
    return file;
}

#define OPEN(name) \
    int name(const char *path, int flags, ...) { \
        va_list more; \
        va_start(more, flags); \
        mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(more, mode_t) : 0; \
        va_end(more); \
        return opened(path, flags, mode); \
    }
OPEN(open)
OPEN(open64)
int __open_2(const char *path, int flags) { return opened(path, flags, 0); }
int __open64_2(const char *path, int flags) { return opened(path, flags, 0); }

int close(int file) {
    REAL(close, int, int);
    if (!is_watched(file)) return real(file);
    pthread_mutex_lock(&turn);
    watched[file] = 0;
    int result = real(file);
    pthread_mutex_unlock(&turn);
    return result;
}

ssize_t write(int file, const void *data, size_t size) {
    REAL(write, ssize_t, int, const void *, size_t);
    if (!is_watched(file)) return real(file, data, size);
    pthread_mutex_lock(&turn);
    off_t offset = lseek(file, 0, SEEK_CUR);
    if (fcntl(file, F_GETFL) & O_APPEND) abort(); /* unsupported: the offset of the write is unknown */
    ssize_t done = real(file, data, size);
    if (done > 0) note('W', inode_of(file), (uint64_t)offset, data, (size_t)done, NULL);
    pthread_mutex_unlock(&turn);
    return done;
}

static ssize_t written_at(int file, const void *data, size_t size, off64_t offset) {
    REAL(pwrite64, ssize_t, int, const void *, size_t, off64_t);
    if (!is_watched(file)) return real(file, data, size, offset);
    pthread_mutex_lock(&turn);
    ssize_t done = real(file, data, size, offset);
    if (done > 0) note('W', inode_of(file), (uint64_t)offset, data, (size_t)done, NULL);
    pthread_mutex_unlock(&turn);
    return done;
}
ssize_t pwrite(int file, const void *data, size_t size, off_t offset) { return written_at(file, data, size, offset); }
ssize_t pwrite64(int file, const void *data, size_t size, off64_t offset) {
    return written_at(file, data, size, offset);
}

static int truncated(int file, off64_t size) {
    REAL(ftruncate64, int, int, off64_t);
    if (!is_watched(file)) return real(file, size);
    pthread_mutex_lock(&turn);
    int result = real(file, size);
    if (result == 0) note('T', inode_of(file), (uint64_t)size, NULL, 0, NULL);
    pthread_mutex_unlock(&turn);
    return result;
}
int ftruncate(int file, off_t size) { return truncated(file, size); }
int ftruncate64(int file, off64_t size) { return truncated(file, size); }

/* Record the fsync without waiting for the disk: the replayed trace decides what was durable. */
static int synced(int file) {
    if (!is_watched(file)) return 0;
    pthread_mutex_lock(&turn);
    char name[64], path[4096];
    struct stat status;
    snprintf(name, sizeof name, "/proc/self/fd/%d", file);
    ssize_t length = readlink(name, path, sizeof path);
    if (fstat(file, &status) != 0 || length < 0) abort();
    if (S_ISDIR(status.st_mode)) note('D', 0, 0, path, (size_t)length, NULL);
    else note('S', status.st_ino, 0, NULL, 0, NULL);
    pthread_mutex_unlock(&turn);
    return 0;
}
int fsync(int file) { return synced(file); }
int fdatasync(int file) { return synced(file); }

int rename(const char *from, const char *to) {
    REAL(rename, int, const char *, const char *);
    if (!inside(from) && !inside(to)) return real(from, to);
    pthread_mutex_lock(&turn);
    int result = real(from, to), failure = errno;
    if (result == 0) note('R', 0, 0, from, strlen(from), to);
    pthread_mutex_unlock(&turn);
    errno = failure;
    return result;
}

int unlink(const char *path) {
    REAL(unlink, int, const char *);
    if (!inside(path)) return real(path);
    pthread_mutex_lock(&turn);
    int result = real(path), failure = errno;
    if (result == 0) note('U', 0, 0, path, strlen(path), NULL);
    pthread_mutex_unlock(&turn);
    errno = failure;
    return result;
}

int mkdir(const char *path, mode_t mode) {
    REAL(mkdir, int, const char *, mode_t);
    if (!inside(path)) return real(path, mode);
    pthread_mutex_lock(&turn);
    int result = real(path, mode), failure = errno;
    if (result == 0) note('M', 0, 0, path, strlen(path), NULL);
    pthread_mutex_unlock(&turn);
    errno = failure;
    return result;
}
