/* Loaded before libc: fsync and fdatasync that fail, or take long, for some files.
 *
 * BACKSTAY_TEST_FSYNC names a file that holds what is to happen, read at each call:
 * "fail TEXT": EIO for files whose path holds TEXT; "manifest": EIO for a folder that has a
 * manifest.json; "sleep MS TEXT": so long for files whose path holds TEXT; else nothing. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static int wrong(int fd)
{
    const char *control = getenv("BACKSTAY_TEST_FSYNC");
    char link[64], path[4096], beside[4200], text[256] = "";
    unsigned ms = 0;
    FILE *file = control ? fopen(control, "r") : NULL;
    char line[512] = "";
    ssize_t length;

    if (!file)
        return 0;
    if (!fgets(line, sizeof line, file))
        line[0] = 0;
    fclose(file);
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    length = readlink(link, path, sizeof path - 1);
    if (length < 0)
        return 0;
    path[length] = 0;
    if (sscanf(line, "fail %255s", text) == 1)
        return strstr(path, text) != NULL;
    if (sscanf(line, "sleep %u %255s", &ms, text) == 2 && strstr(path, text))
        usleep(ms * 1000);
    if (strncmp(line, "manifest", 8) == 0) {
        snprintf(beside, sizeof beside, "%s/manifest.json", path);
        return access(beside, F_OK) == 0;
    }
    return 0;
}

static int call(const char *name, int fd)
{
    int (*real)(int) = (int (*)(int))dlsym(RTLD_NEXT, name);

    if (wrong(fd)) {
        errno = EIO;
        return -1;
    }
    return real(fd);
}

int fsync(int fd)
{
    return call("fsync", fd);
}

int fdatasync(int fd)
{
    return call("fdatasync", fd);
}
