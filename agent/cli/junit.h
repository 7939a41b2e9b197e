/* Verdicts as JUnit XML, so that a CI shows each file as a suite, with the verdict and each gradient as test cases. */
#ifndef KA_JUNIT_H
#define KA_JUNIT_H

#include <jansson.h>

#include "base/base.h"

/* Append the suite of one checked file. `result`: the result object; NULL for a file that could not even be begun. A wrong
 * backward is a failure, a forward that cannot be used (and a missing result) an error, as JUnit tells them apart. */
void ka_junit_add(struct ka_buf *suites, const char *file, const json_t *result);

/* Write the document of all suites. Errors as ka_file_write(). */
int ka_junit_write(const char *path, const struct ka_buf *suites, struct ka_err *err);

#endif
