//go:build unix

package servers

import (
	"slices"
	"testing"
)

func TestFindPostgreSQL(t *testing.T) {
	pair := func(folder string) []string { return []string{folder + "/initdb", folder + "/postgres"} }
	tests := []struct {
		name  string
		files []string
		want  string // the folder, empty: not found
	}{
		{"nothing", nil, ""},
		{"half of it", []string{"/usr/bin/postgres", "/usr/pgsql-16/bin/postgres"}, ""},
		{"the PATH first", slices.Concat(pair("/usr/lib/postgresql/17/bin"), pair("/usr/bin")), "/usr/bin"},
		{"the newest version by number", slices.Concat(pair("/usr/lib/postgresql/9.6/bin"), pair("/usr/lib/postgresql/15/bin"), pair("/usr/lib/postgresql/9.5/bin")), "/usr/lib/postgresql/15/bin"},
		{"the newest that is complete", append(pair("/usr/lib/postgresql/15/bin"), "/usr/lib/postgresql/17/bin/postgres"), "/usr/lib/postgresql/15/bin"},
		{"other packagers", pair("/opt/homebrew/opt/postgresql@16/bin"), "/opt/homebrew/opt/postgresql@16/bin"},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			got, ok := fakeMachine(test.files, nil).findPostgreSQL()
			want := postgresqlPrograms{}
			if test.want != "" {
				want = postgresqlPrograms{test.want + "/initdb", test.want + "/postgres"}
			}
			if got != want || ok != (test.want != "") {
				t.Errorf("findPostgreSQL() = %v, %v, want %v", got, ok, want)
			}
		})
	}
}

func TestFindRabbitMQ(t *testing.T) {
	const (
		own     = "/usr/lib/rabbitmq/lib/rabbitmq_server-3.10.8/sbin/rabbitmq-server"
		older   = "/usr/lib/rabbitmq/lib/rabbitmq_server-3.9.13/sbin/rabbitmq-server"
		wrapper = "/usr/bin/rabbitmq-server"
		onPath  = "/usr/bin/epmd"
		inErts  = "/usr/lib/erlang/erts-13.1.5/bin/epmd"
	)
	tests := []struct {
		name  string
		files []string
		want  rabbitmqPrograms
		found bool
	}{
		{"nothing", nil, rabbitmqPrograms{}, false},
		{"no Erlang", []string{own}, rabbitmqPrograms{own, ""}, false},
		{"the package's script before the PATH", []string{wrapper, older, own, onPath}, rabbitmqPrograms{own, onPath}, true},
		{"the PATH", []string{wrapper, inErts}, rabbitmqPrograms{wrapper, inErts}, true},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			got, ok := fakeMachine(test.files, nil).findRabbitMQ()
			if ok != test.found || ok && got != test.want {
				t.Errorf("findRabbitMQ() = %v, %v, want %v, %v", got, ok, test.want, test.found)
			}
		})
	}
}
