/* Interpreters of this machine, and which of them to use. Knows nothing of the jail or of children. */
#include "python.h"

#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "agent/io/probe.h"
#include "base/each.h"
#include "base/files.h"

#define LIST_MAX 64
#define ASK_MS 20000
#define ANSWER_MAX ((size_t)64 << 10)
#define SAID_MAX 700 /* of the list in a message (struct ka_err); the rest is counted */
#define REMEDY                                                                                               \
    "python3 -m venv venv && venv/bin/pip install torch triton numpy, then --python venv/bin/python"

static const char NAMED[] = "--python";

static const struct {
    const char *name, *title;
    unsigned major, minor;
} needs[] = {{"python", "Python", 3, 11},
             {"torch", "torch", 2, 6},
             {"triton", "Triton", 3, 2},
             {"numpy", "numpy", 0, 0}};

/* find_spec of a module without a dot runs nothing of it. A folder without __init__.py is no module.
 * Its files say which version it is: to import metadata takes longer than all else, and distributions of
 * Triton have many names. "user" is what this user alone has; the jail does not look there. */
static const char question[] =
    "import importlib.util, json, os, re, site, sys\n"
    "def version(name):\n"
    "    try:\n"
    "        spec = importlib.util.find_spec(name)\n"
    "    except Exception:\n"
    "        return None\n"
    "    if spec is None or not spec.origin:\n"
    "        return None\n"
    "    for part in ('version.py', '__init__.py'):\n"
    "        try:\n"
    "            with open(os.path.join(os.path.dirname(spec.origin), part), errors='replace') as file:\n"
    "                text = file.read(65536)\n"
    "            found = re.search(r'(?m)^(?:__)?version(?:__)?\\s*=\\s*[\\'\"]([^\\'\"]+)', text)\n"
    "        except OSError:\n"
    "            found = None\n"
    "        if found:\n"
    "            return found.group(1)\n"
    "    from importlib import metadata\n"
    "    try:\n"
    "        return metadata.version(name)\n"
    "    except Exception:\n"
    "        return 'unknown'\n"
    "out = {'executable': sys.executable, 'python': '%d.%d.%d' % tuple(sys.version_info[:3])}\n"
    "for name in ('torch', 'triton', 'numpy'):\n"
    "    out[name] = version(name)\n"
    "try:\n"
    "    own = site.getusersitepackages()\n"
    "    out['user'] = [n for n in ('torch', 'triton', 'numpy') if os.path.isdir(os.path.join(own, n))]\n"
    "except Exception:\n"
    "    out['user'] = []\n"
    "own = [os.path.realpath(p) for p in (sys.prefix, sys.base_prefix, '/usr', '/opt', '/nix/store')]\n"
    "found = [p for p in sys.path if os.path.basename(p) not in ('site-packages', 'dist-packages')]\n"
    "for finder in sys.meta_path:\n"
    "    module = sys.modules.get(getattr(finder, '__module__', None))\n"
    "    where = getattr(module, 'MAPPING', None)\n"
    "    for name, path in where.items() if isinstance(where, dict) else ():\n"
    "        if isinstance(path, str) and os.path.basename(path) == name:\n"
    "            found.append(os.path.dirname(path))\n"
    "found = [os.path.realpath(path) for path in found if os.path.isdir(path)]\n"
    "out['elsewhere'] = [\n"
    "    p for p in dict.fromkeys(found) if not any((p + '/').startswith(o + '/') for o in own)\n"
    "]\n"
    "print('\\n' + json.dumps(out))\n";

/* ---- what is needed ---- */

static bool is_older(const char *version, unsigned major, unsigned minor)
{
    unsigned have_major = 0, have_minor = 0;
    if (sscanf(version, "%u.%u", &have_major, &have_minor) != 2)
        return false; /* a version of one's own */
    return have_major < major || (have_major == major && have_minor < minor);
}

static bool is_of_the_user(const json_t *versions, const char *name)
{
    KA_EACH(json_object_get(versions, "user"), i, entry) {
        if (json_is_string(entry) && strcmp(json_string_value(entry), name) == 0)
            return true;
    }
    return false;
}

bool ka_python_fits(const json_t *versions, struct ka_buf *lacks)
{
    KA_AUTO_BUF struct ka_buf found = {0};
    for (size_t i = 0; i < KA_COUNT(needs); i++) {
        const char *version = json_string_value(json_object_get(versions, needs[i].name));
        if (version && !is_older(version, needs[i].major, needs[i].minor))
            continue;
        ka_buf_printf(&found, "%s%s", found.len ? ", " : "", needs[i].title);
        if (version)
            ka_buf_printf(&found, " %u.%u (it is %.40s)", needs[i].major, needs[i].minor, version);
        else if (is_of_the_user(versions, needs[i].name))
            ka_buf_puts(&found, " (only pip install --user has it, which the jail does not read)");
    }
    if (lacks)
        ka_buf_puts(lacks, ka_buf_str(&found));
    return found.len == 0;
}

/* ---- what there is ---- */

static char *virtual_root(const char *place)
{
    KA_AUTO_FREE char *at = ka_strdup(place);
    for (int i = 0; i < 2 && strrchr(at, '/'); i++) {
        *strrchr(at, '/') = '\0';
        KA_AUTO_FREE char *mark = ka_path_join(at, "pyvenv.cfg");
        if (access(mark, F_OK) == 0)
            return realpath(at, NULL);
    }
    return NULL;
}

static bool is_same(const char *a, const char *b)
{
    KA_AUTO_FREE char *real_a = realpath(a, NULL), *real_b = realpath(b, NULL);
    KA_AUTO_FREE char *root_a = virtual_root(a), *root_b = virtual_root(b);
    return strcmp(real_a ? real_a : a, real_b ? real_b : b) == 0 &&
           strcmp(root_a ? root_a : "", root_b ? root_b : "") == 0;
}

/* Takes over `place`. */
static void add(struct ka_pythons *out, char *place, const char *source, char *lacks)
{
    bool known = out->count == LIST_MAX;
    for (size_t i = 0; i < out->count && !known; i++)
        known = is_same(out->list[i].place, place);
    if (known) {
        free(place);
        free(lacks);
        return;
    }
    struct ka_python *p = &out->list[out->count++];
    *p = (struct ka_python){.place = place, .path = ka_strdup(place), .source = source, .lacks = lacks};
}

static bool is_program(const char *path)
{
    struct stat st;
    return access(path, X_OK) == 0 && stat(path, &st) == 0 && S_ISREG(st.st_mode);
}

/* One that somebody set up on purpose: listed also where it cannot be used, with the reason. */
static void add_meant(struct ka_pythons *out, const char *folder, const char *below, const char *source)
{
    struct stat st;
    if (!folder || !*folder)
        return;
    char *place = ka_path_join(folder, below);
    if (is_program(place))
        add(out, place, source, NULL);
    else if (lstat(place, &st) == 0 || errno == EACCES)
        add(out, place, source,
            ka_format("this user cannot run it (%s)",
                      access(place, X_OK) == 0 ? "not a program" : strerror(errno)));
    else
        free(place);
}

static char *next_on_path(const char **path, const char *name)
{
    while (**path) {
        size_t len = strcspn(*path, ":");
        KA_AUTO_FREE char *folder = ka_strndup(*path, len);
        char *place = *folder == '/' ? ka_path_join(folder, name) : NULL;
        *path += len + ((*path)[len] == ':');
        if (place && is_program(place))
            return place;
        free(place);
    }
    return NULL;
}

static void add_from_path(struct ka_pythons *out, const char *path)
{
    static const char *const names[] = {"python3", "python"};
    while (*path) {
        size_t len = strcspn(path, ":");
        KA_AUTO_FREE char *folder = ka_strndup(path, len);
        for (size_t i = 0; i < KA_COUNT(names); i++) {
            const char *at = folder;
            char *place = next_on_path(&at, names[i]);
            if (place)
                add(out, place, "PATH", NULL);
        }
        path += len + (path[len] == ':');
    }
}

static void add_named(struct ka_pythons *out, const char *wanted, const char *path)
{
    char here[PATH_MAX];
    const char *at = path ? path : "";
    char *place = strchr(wanted, '/') ? NULL : next_on_path(&at, wanted);
    if (!place && *wanted != '/' && getcwd(here, sizeof(here)))
        place = ka_path_join(here, wanted);
    else if (!place)
        place = ka_strdup(wanted);
    const char *why = is_program(place)          ? NULL
                      : access(place, X_OK) == 0 ? "it is no program"
                                                 : strerror(errno);
    add(out, place, NAMED, ka_strdup(why));
}

void ka_pythons_list(const struct ka_python_where *where, struct ka_pythons *out)
{
    *out = (struct ka_pythons){.list = ka_calloc(LIST_MAX, sizeof(*out->list))};
    if (where->wanted)
        add_named(out, where->wanted, where->path);
    add_meant(out, where->virtual_env, "bin/python", "$VIRTUAL_ENV");
    add_meant(out, where->conda_prefix, "bin/python", "$CONDA_PREFIX");
    if (where->path)
        add_from_path(out, where->path);
    add_meant(out, where->share, ".venv/bin/python", "the .venv of this installation");
    if (is_program("/usr/bin/python3"))
        add(out, ka_strdup("/usr/bin/python3"), "the system's", NULL);
    out->chosen = out->count;
}

static void free_one(struct ka_python *p)
{
    free(p->place);
    free(p->path);
    free(p->lacks);
    json_decref(p->versions);
}

void ka_pythons_free(struct ka_pythons *pythons)
{
    for (size_t i = 0; i < pythons->count; i++)
        free_one(&pythons->list[i]);
    free(pythons->list);
    *pythons = (struct ka_pythons){.list = NULL};
}

/* ---- asking ---- */

/* What launchers of environments need to find theirs, and no key. */
static void pass_environment(char **env, size_t max)
{
    static const char *const names[] = {"PATH",         "HOME",          "VIRTUAL_ENV",
                                        "CONDA_PREFIX", "PYENV_ROOT",    "PYENV_VERSION",
                                        "ASDF_DIR",     "ASDF_DATA_DIR", "LD_LIBRARY_PATH"};
    size_t count = 0;
    for (size_t i = 0; i < KA_COUNT(names) && count + 1 < max; i++)
        if (getenv(names[i]))
            env[count++] = ka_format("%s=%s", names[i], getenv(names[i]));
    env[count] = NULL;
}

/* Sitecustomize modules and launchers may write before or after the answer. */
static json_t *find_answer(char *text)
{
    json_t *answer = NULL;
    char *rest = NULL;
    for (char *line = text ? strtok_r(text, "\n", &rest) : NULL; line && !json_is_object(answer);
         line = strtok_r(NULL, "\n", &rest)) {
        json_decref(answer);
        answer = *line == '{' ? json_loads(line, 0, NULL) : NULL;
    }
    if (json_is_object(answer) && json_is_string(json_object_get(answer, "python")))
        return answer;
    json_decref(answer);
    return NULL;
}

static int ask_really(void *arg, const char *place, json_t **answer, struct ka_err *err)
{
    const char *argv[] = {place, "-I", "-B", "-c", question, NULL};
    char *env[16];
    KA_AUTO_BUF struct ka_buf out = {.max = ANSWER_MAX};
    (void)arg;
    pass_environment(env, KA_COUNT(env));
    int rc = ka_probe_run(argv, (const char *const *)env, ASK_MS, &out, err);
    for (size_t i = 0; env[i]; i++)
        free(env[i]);
    if (rc < 0)
        return rc;
    *answer = find_answer(out.data); /* cut into lines by now: the first one shows */
    return *answer ? 0
                   : ka_fail(err, -EPROTO, "does not answer like Python 3 (exit code %d: %.100s)", rc,
                             ka_buf_str(&out));
}

static bool is_script(const char *path)
{
    char start[2] = {0};
    FILE *file = fopen(path, "re");
    bool is = file && fread(start, 1, 2, file) == 2 && start[0] == '#' && start[1] == '!';
    if (file)
        fclose(file);
    return is;
}

static void ask_one(struct ka_python *p, ka_python_ask_fn ask, void *arg)
{
    struct ka_err err;
    KA_AUTO_BUF struct ka_buf lacks = {0};
    if (p->asked || p->lacks)
        return;
    p->asked = true;
    if (ask(arg, p->place, &p->versions, &err) != 0) {
        p->versions = NULL;
        p->lacks = ka_strdup(err.msg);
        return;
    }
    const char *executable = json_string_value(json_object_get(p->versions, "executable"));
    if (executable && *executable == '/' &&
        is_script(p->place)) { /* a shim: the jail would not have what it starts */
        free(p->path);
        p->path = ka_strdup(executable);
    }
    if (!ka_python_fits(p->versions, &lacks))
        p->lacks = ka_buf_steal(&lacks);
}

/* Shims of several names start one interpreter. */
static bool is_known(const struct ka_pythons *pythons, size_t at)
{
    for (size_t i = 0; i < at; i++)
        if (is_same(pythons->list[i].path, pythons->list[at].path))
            return true;
    return false;
}

static void drop(struct ka_pythons *pythons, size_t at)
{
    free_one(&pythons->list[at]);
    memmove(&pythons->list[at], &pythons->list[at + 1], (--pythons->count - at) * sizeof(*pythons->list));
}

void ka_pythons_choose(struct ka_pythons *pythons, bool all, ka_python_ask_fn ask, void *arg)
{
    bool named = pythons->count && pythons->list[0].source == NAMED;
    bool found = false;
    size_t chosen = SIZE_MAX;
    for (size_t i = 0; i < pythons->count && (all || !found);) {
        if (!is_known(pythons, i))
            ask_one(&pythons->list[i], ask ? ask : ask_really, arg);
        if (is_known(pythons, i)) {
            drop(pythons, i);
            continue;
        }
        if (!pythons->list[i].lacks) {
            if (!found && (!named || i == 0))
                chosen = i;
            found = true;
        }
        i++;
    }
    pythons->chosen = chosen < pythons->count ? chosen : pythons->count;
}

void ka_pythons_find(const char *wanted, const char *share, bool all, struct ka_pythons *out)
{
    const struct ka_python_where where = {.wanted = wanted,
                                          .virtual_env = getenv("VIRTUAL_ENV"),
                                          .conda_prefix = getenv("CONDA_PREFIX"),
                                          .path = getenv("PATH"),
                                          .share = share};
    ka_pythons_list(&where, out);
    ka_pythons_choose(out, all, NULL, NULL);
}

/* ---- saying it ---- */

static const struct ka_python *first_usable(const struct ka_pythons *pythons)
{
    for (size_t i = 0; i < pythons->count; i++)
        if (pythons->list[i].asked && !pythons->list[i].lacks)
            return &pythons->list[i];
    return NULL;
}

void ka_pythons_complain(const struct ka_pythons *pythons, struct ka_err *err)
{
    const struct ka_python *other = first_usable(pythons), *first = pythons->list;
    KA_AUTO_BUF struct ka_buf text = {0};
    if (pythons->count && first->source == NAMED) {
        ka_buf_printf(&text, "--python %s: %s%s; ", first->place, first->versions ? "it lacks " : "",
                      first->lacks);
        if (other)
            ka_buf_printf(&text, "this one can be used: --python %s", other->path);
        else
            ka_buf_puts(&text, "no other was found that can be used. One is made with: " REMEDY);
    } else {
        ka_buf_puts(&text, "no Python with torch and Triton was found; name one with --python PATH, or make "
                           "one: " REMEDY ". Tried:");
        size_t i = 0;
        for (; i < pythons->count && text.len < SAID_MAX; i++) {
            const struct ka_python *p = &pythons->list[i];
            ka_buf_printf(&text, "\n  %s (%s): %s%s", p->place, p->source, p->versions ? "lacks " : "",
                          p->lacks);
        }
        if (i < pythons->count)
            ka_buf_printf(&text, "\n  and %zu more: kernel-agent doctor lists them", pythons->count - i);
        if (pythons->count == 0)
            ka_buf_puts(&text, " none is there");
    }
    ka_fail(err, -ENOENT, "%s", ka_buf_str(&text));
}
