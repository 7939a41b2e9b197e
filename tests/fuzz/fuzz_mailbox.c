/* Any bytes as the files of a mailbox: an answer has content, and what cannot be used is refused with the
 * path. The first byte says which of the two kinds of file holds the rest. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "agent/io/mailbox.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static char folder[] = "/tmp/fuzz-mailbox-XXXXXX";

static void remove_folder(void)
{
    rmdir(folder);
}

static void write_file(const char *path, const uint8_t *data, size_t size)
{
    FILE *file = fopen(path, "wb");
    if (!file || fwrite(data, 1, size, file) != size || fclose(file))
        abort();
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static bool made;
    if (!made && mkdtemp(folder))
        made = atexit(remove_folder) == 0;
    if (!made || !size)
        return 0;
    struct ka_mailbox box = {.dir = folder, .run = "fuzz"};
    struct ka_chat_answer answer = {0};
    struct ka_err err = {{0}};
    char path[96];
    snprintf(path, sizeof(path), "%s/fuzz-001.answer.%s", folder, data[0] & 1 ? "json" : "md");
    write_file(path, data + 1, size - 1);
    int rc = ka_mailbox_poll(&box, 1, NULL, &answer, &err);
    unlink(path);
    if (rc == 0 && (ka_chat_answer_empty(&answer) || !answer.text))
        abort();
    if (rc != 0 && rc != -EAGAIN && !strstr(err.msg, path))
        abort();
    ka_chat_answer_free(&answer);
    return 0;
}
