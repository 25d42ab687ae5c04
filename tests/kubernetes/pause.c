/* The first process of each Pod: it holds the Pod's namespaces, and reaps what is left to it. */
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

static void reap(int signal_number) {
    (void)signal_number;
    while (waitpid(-1, 0, WNOHANG) > 0) {
    }
}

static void end(int signal_number) {
    (void)signal_number;
    _exit(0);
}

int main(void) {
    signal(SIGCHLD, reap);
    signal(SIGTERM, end);
    signal(SIGINT, end);
    for (;;) {
        pause();
    }
}
