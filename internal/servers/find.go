//go:build unix

package servers

import (
	"cmp"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
)

// Folders in which packages put PostgreSQL's programs, off the PATH because
// several versions can be there.
var postgresqlFolders = []string{
	"/usr/lib/postgresql/*/bin",
	"/usr/pgsql-*/bin",
	"/opt/homebrew/opt/postgresql*/bin",
	"/usr/local/opt/postgresql*/bin",
	"/usr/local/pgsql/bin",
}

// Folders of RabbitMQ's own scripts. They come before the PATH: what Debian has
// there is a wrapper that changes to the system service's user and folders.
var rabbitmqFolders = []string{
	"/usr/lib/rabbitmq/lib/rabbitmq_server-*/sbin",
	"/opt/homebrew/opt/rabbitmq/sbin",
	"/usr/local/opt/rabbitmq/sbin",
}

// Folders of Erlang's port mapper where it is not on the PATH.
var epmdFolders = []string{
	"/usr/lib/erlang/erts-*/bin",
	"/usr/lib64/erlang/erts-*/bin",
	"/opt/homebrew/opt/erlang/lib/erlang/erts-*/bin",
	"/usr/local/opt/erlang/lib/erlang/erts-*/bin",
	"/usr/local/lib/erlang/erts-*/bin",
}

// postgresqlPrograms are the programs of one PostgreSQL installation.
type postgresqlPrograms struct{ initdb, postgres string }

// rabbitmqPrograms are the start script of one RabbitMQ installation and the
// port mapper of its Erlang.
type rabbitmqPrograms struct{ server, epmd string }

// findPostgreSQL looks on the PATH and then in the packages' folders.
func (m machine) findPostgreSQL() (postgresqlPrograms, bool) {
	initdb, err1 := m.lookPath("initdb")
	postgres, err2 := m.lookPath("postgres")
	if err1 == nil && err2 == nil {
		return postgresqlPrograms{initdb, postgres}, true
	}
	for _, folder := range m.folders(postgresqlFolders) {
		initdb, ok1 := m.inFolder(folder, "initdb")
		postgres, ok2 := m.inFolder(folder, "postgres")
		if ok1 && ok2 {
			return postgresqlPrograms{initdb, postgres}, true
		}
	}
	return postgresqlPrograms{}, false
}

// findRabbitMQ looks in the packages' folders and then on the PATH.
func (m machine) findRabbitMQ() (rabbitmqPrograms, bool) {
	server, ok1 := m.first(rabbitmqFolders, "rabbitmq-server")
	if !ok1 {
		var err error
		server, err = m.lookPath("rabbitmq-server")
		ok1 = err == nil
	}
	epmd, err := m.lookPath("epmd")
	ok2 := err == nil
	if !ok2 {
		epmd, ok2 = m.first(epmdFolders, "epmd")
	}
	return rabbitmqPrograms{server, epmd}, ok1 && ok2
}

// found reports whether a private server of that kind can be started.
func (m machine) found(kind Kind) bool {
	var ok bool
	if kind == KindRabbitMQ {
		_, ok = m.findRabbitMQ()
	} else {
		_, ok = m.findPostgreSQL()
	}
	return ok
}

// first is the first of the folders that has the program.
func (m machine) first(patterns []string, program string) (string, bool) {
	for _, folder := range m.folders(patterns) {
		if path, ok := m.inFolder(folder, program); ok {
			return path, true
		}
	}
	return "", false
}

// inFolder asks lookPath, which also knows whether the file can be executed.
func (m machine) inFolder(folder, program string) (string, bool) {
	path, err := m.lookPath(folder + string(os.PathSeparator) + program)
	return path, err == nil
}

// folders expands the patterns in their order, newest version first.
func (m machine) folders(patterns []string) []string {
	var all []string
	for _, pattern := range patterns {
		matches, _ := m.glob(pattern) // fails for malformed patterns only
		matches = slices.Clone(matches)
		slices.SortFunc(matches, func(a, b string) int { return -compareVersions(a, b) })
		all = append(all, matches...)
	}
	return all
}

var number = regexp.MustCompile(`\d+`)

// compareVersions compares paths by the numbers in them: 9.6 before 15.
func compareVersions(a, b string) int {
	numbers := func(path string) []int {
		var ns []int
		for _, digits := range number.FindAllString(filepath.ToSlash(path), -1) {
			n, _ := strconv.Atoi(digits)
			ns = append(ns, n)
		}
		return ns
	}
	return cmp.Or(slices.Compare(numbers(a), numbers(b)), cmp.Compare(a, b))
}
