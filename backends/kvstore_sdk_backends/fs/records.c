/* Whole batches of records between buffers and files, in one call that holds no interpreter lock.
 *
 * The common case and nothing else: one read, or one write and one rename, that does all it was asked for. Whatever is unusual (a missing
 * folder, a short count, a refused flag, any error) is undone and left to the caller, whose own way through it has the last word about what
 * it means. `native.py` calls this, and says what arguments are.
 *
 * Nothing is kept between calls, so any number of threads may be in one.
 */

#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

/* Changes with any argument, answer or meaning: `native.py` uses no library that says something else. */
#define ABI 1

#define PAGE_BYTES 4096
#define MAX_PARTS 1023 /* IOV_MAX, but for one buffer behind the record */

enum answer {
    UNDONE = 0,  /* nothing is changed */
    DONE = 1,    /* found and read; or stored */
    MISSING = 2, /* no such record */
    EXISTS = 3,  /* a record is there, and was left as it is */
    WRITTEN = 4, /* the temporary file holds all of it and was not, or may not have been, renamed */
};

/* The bytes of one item: `count` buffers from `first` on, which lie side by side in the caller's array. */
struct item {
    uint64_t first;
    uint64_t count;
};

struct limits {
    int64_t stop_ns;              /* CLOCK_MONOTONIC */
    const volatile int32_t *stop; /* not 0: begin nothing more */
};

/* Where the byte after a record would go: any number of reads may share it, for nobody looks at it. */
static char spill[PAGE_BYTES] __attribute__((aligned(PAGE_BYTES)));

int32_t kvstore_fs_abi(void) { return ABI; }

static int stopped(const struct limits *limits) {
    struct timespec now;
    if (*limits->stop)
        return 1;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec >= limits->stop_ns;
}

/* How many bytes the buffers have together; O_DIRECT goes into `flags` if it is wanted and all of them are whole pages. */
static size_t measure(const struct iovec *parts, uint64_t count, int direct, int *flags) {
    uintptr_t bits = 0;
    size_t size = 0;
    for (uint64_t i = 0; i < count; i++) {
        bits |= (uintptr_t)parts[i].iov_base | parts[i].iov_len;
        size += parts[i].iov_len;
    }
    if (direct && bits % PAGE_BYTES == 0)
        *flags |= O_DIRECT;
    return size;
}

static enum answer get(const char *path, const struct iovec *parts, uint64_t count, int direct) {
    struct iovec into[MAX_PARTS + 1];
    /* Opening a FIFO or a device that stands in a record's place must not wait for a peer. */
    int flags = O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK;
    size_t size = measure(parts, count, direct, &flags);
    int fd = open(path, flags);
    if (fd < 0)
        return errno == ENOENT ? MISSING : UNDONE;
    memcpy(into, parts, count * sizeof *parts);
    /* One page more than asked for, so that the read itself tells a file that is too long. */
    into[count] = (struct iovec){spill, PAGE_BYTES};
    ssize_t done = preadv(fd, into, (int)count + 1, 0);
    close(fd);
    return done >= 0 && (size_t)done == size ? DONE : UNDONE;
}

static enum answer put(const char *path, const char *temp, const struct iovec *parts, uint64_t count, int create, int direct,
                       const struct limits *limits) {
    struct stat facts;
    int flags = O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW;
    /* `access` costs a fraction of `stat` where nothing is, which is the rule. */
    if (create && access(path, F_OK) == 0 && lstat(path, &facts) == 0 && S_ISREG(facts.st_mode))
        return EXISTS;
    size_t size = measure(parts, count, direct, &flags);
    int fd = open(temp, flags, 0666);
    if (fd < 0) {
        /* Linux may have created the file before it refused a flag. */
        if (errno != EEXIST)
            unlink(temp);
        return UNDONE;
    }
    ssize_t done = pwritev(fd, parts, (int)count, 0);
    /* Network filesystems report a full disk here at the latest. */
    if (close(fd) != 0 || done < 0 || (size_t)done != size) {
        unlink(temp);
        return UNDONE;
    }
    if (stopped(limits) || rename(temp, path) != 0)
        return WRITTEN;
    return DONE;
}

/* Read records until they are done or `limits` say stop. `names`: the paths, each ended by a zero byte. */
void kvstore_fs_get(const char *names, const struct item *items, const struct iovec *parts, uint32_t count, int32_t direct, int64_t stop_ns,
                    const volatile int32_t *stop, uint8_t *answers) {
    struct limits limits = {stop_ns, stop};
    for (uint32_t i = 0; i < count && !stopped(&limits); i++) {
        answers[i] = (uint8_t)get(names, parts + items[i].first, items[i].count, direct);
        names += strlen(names) + 1;
    }
}

/* Store records until they are done or `limits` say stop. `names`: of each the path, and that of a file that is not there yet, each ended
 * by a zero byte. `create`: of each, whether a record that is there is to be left as it is. */
void kvstore_fs_put(const char *names, const struct item *items, const struct iovec *parts, const uint8_t *create, uint32_t count,
                    int32_t direct, int64_t stop_ns, const volatile int32_t *stop, uint8_t *answers) {
    struct limits limits = {stop_ns, stop};
    for (uint32_t i = 0; i < count && !stopped(&limits); i++) {
        const char *temp = names + strlen(names) + 1;
        answers[i] = (uint8_t)put(names, temp, parts + items[i].first, items[i].count, create[i], direct, &limits);
        names = temp + strlen(temp) + 1;
    }
}
