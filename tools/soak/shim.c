/* Counts the system calls that change files below a directory, and lets the process die, or a disk fail, at the n-th.
 *
 * Loaded by LD_PRELOAD; dormant until `soak_arm`. `soak_count` says how many calls there were since.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

static char root[PATH_MAX];
static size_t root_length;
static atomic_long calls;
static long at, times;
static int error; /* 0: SIGKILL */

void soak_arm(const char *directory, long first, long how_often, int number) {
  snprintf(root, sizeof root, "%s", directory);
  root_length = strlen(root);
  at = first, times = how_often, error = number;
  atomic_store(&calls, 0);
}

long soak_count(void) { return atomic_load(&calls); }

static int inside(const char *path) {
  return path && root_length && strncmp(path, root, root_length) == 0 && (path[root_length] == '/' || !path[root_length]);
}

static int inside_fd(int fd) {
  char link[64], path[PATH_MAX];
  if (!root_length) return 0;
  snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  ssize_t n = readlink(link, path, sizeof path - 1);
  if (n <= 0) return 0;
  path[n] = 0;
  return inside(path);
}

static int inside_at(int fd, const char *path) { return path && path[0] == '/' ? inside(path) : fd >= 0 && inside_fd(fd); }

/* Whether the call has to fail; errno says how. */
static int struck(int counts) {
  if (!counts) return 0;
  long now = atomic_fetch_add(&calls, 1) + 1;
  if (!at || now < at || now >= at + times) return 0;
  if (!error) kill(getpid(), SIGKILL);
  errno = error;
  return 1;
}

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))
#define WRAP(result, name, parameters, arguments, counts)     \
  result name parameters {                                    \
    static __typeof__(&name) real;                            \
    if (!real) real = REAL(name);                             \
    return struck(counts) ? -1 : real arguments;              \
  }

WRAP(ssize_t, write, (int fd, const void *b, size_t n), (fd, b, n), inside_fd(fd))
WRAP(ssize_t, pwrite, (int fd, const void *b, size_t n, off_t o), (fd, b, n, o), inside_fd(fd))
WRAP(ssize_t, pwrite64, (int fd, const void *b, size_t n, off64_t o), (fd, b, n, o), inside_fd(fd))
WRAP(ssize_t, writev, (int fd, const struct iovec *v, int n), (fd, v, n), inside_fd(fd))
WRAP(int, fsync, (int fd), (fd), inside_fd(fd))
WRAP(int, fdatasync, (int fd), (fd), inside_fd(fd))
WRAP(int, ftruncate, (int fd, off_t n), (fd, n), inside_fd(fd))
WRAP(int, ftruncate64, (int fd, off64_t n), (fd, n), inside_fd(fd))
WRAP(ssize_t, copy_file_range, (int a, off64_t *x, int b, off64_t *y, size_t n, unsigned f), (a, x, b, y, n, f), inside_fd(b))
WRAP(ssize_t, sendfile, (int b, int a, off_t *x, size_t n), (b, a, x, n), inside_fd(b))
WRAP(ssize_t, sendfile64, (int b, int a, off64_t *x, size_t n), (b, a, x, n), inside_fd(b))
WRAP(int, rename, (const char *a, const char *b), (a, b), inside(b))
WRAP(int, renameat, (int c, const char *a, int d, const char *b), (c, a, d, b), inside_at(d, b))
WRAP(int, renameat2, (int c, const char *a, int d, const char *b, unsigned f), (c, a, d, b, f), inside_at(d, b))
WRAP(int, link, (const char *a, const char *b), (a, b), inside(b))
WRAP(int, linkat, (int c, const char *a, int d, const char *b, int f), (c, a, d, b, f), inside_at(d, b))
WRAP(int, symlink, (const char *a, const char *b), (a, b), inside(b))
WRAP(int, mkdir, (const char *a, mode_t m), (a, m), inside(a))
WRAP(int, mkdirat, (int c, const char *a, mode_t m), (c, a, m), inside_at(c, a))
/* A full disk deletes, and so does a broken one mostly: only a kill comes here. */
WRAP(int, unlink, (const char *a), (a), !error && inside(a))
WRAP(int, unlinkat, (int c, const char *a, int f), (c, a, f), !error && inside_at(c, a))
WRAP(int, rmdir, (const char *a), (a), !error && inside(a))

#define OPEN(name)                                                                \
  int name(const char *path, int flags, ...) {                                    \
    static int (*real)(const char *, int, ...);                                   \
    va_list more;                                                                 \
    va_start(more, flags);                                                        \
    mode_t mode = va_arg(more, mode_t);                                           \
    va_end(more);                                                                 \
    if (!real) real = (int (*)(const char *, int, ...))dlsym(RTLD_NEXT, #name);   \
    return struck((flags & O_CREAT) && inside(path)) ? -1 : real(path, flags, mode); \
  }
OPEN(open)
OPEN(open64)

#define OPENAT(name)                                                                      \
  int name(int fd, const char *path, int flags, ...) {                                    \
    static int (*real)(int, const char *, int, ...);                                      \
    va_list more;                                                                         \
    va_start(more, flags);                                                                \
    mode_t mode = va_arg(more, mode_t);                                                   \
    va_end(more);                                                                         \
    if (!real) real = (int (*)(int, const char *, int, ...))dlsym(RTLD_NEXT, #name);      \
    return struck((flags & O_CREAT) && inside_at(fd, path)) ? -1 : real(fd, path, flags, mode); \
  }
OPENAT(openat)
OPENAT(openat64)
