package examples

import (
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// Who imports a package pays for what it needs, and for nothing else: no package links a driver, a broker or another
// SQL library that its user has not asked for.
func TestPackagesLinkOnlyWhatTheyNeed(t *testing.T) {
	t.Parallel()
	const (
		pq           = "github.com/lib/pq"
		pgx          = "github.com/jackc/pgx/v5"
		watermillSQL = "github.com/ThreeDotsLabs/watermill-sql/v3"
		amqp         = "github.com/ThreeDotsLabs/watermill-amqp/v2"
		sqlite       = "modernc.org/sqlite"
	)
	for folder, want := range map[string][]string{
		".":          nil,
		"sql":        nil,
		"sql/pq":     {pq},
		"outbox":     {watermillSQL},
		"partitions": nil,
		"inboxtest":  nil,
		"amqp":       {amqp},
		"pgx":        {pgx},
	} {
		list := exec.Command("go", "list", "-deps", "-f", "{{with .Module}}{{.Path}}{{end}}", ".")
		list.Dir = filepath.Join("../../..", folder)
		output, err := list.CombinedOutput()
		if err != nil {
			t.Fatalf("%s: %v\n%s", folder, err, output)
		}
		modules := strings.Fields(string(output))
		for _, heavy := range []string{pq, pgx, watermillSQL, amqp, sqlite} {
			if got := slices.Contains(modules, heavy); got != slices.Contains(want, heavy) {
				t.Errorf("package %s links %s: %v", folder, heavy, got)
			}
		}
	}
}
