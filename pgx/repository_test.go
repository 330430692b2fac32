package inboxpgx_test

import (
	"context"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	inboxpgx "github.com/devmappa/watermill-inbox/pgx"
)

func TestNewRepositoryRefuses(t *testing.T) {
	pool, err := pgxpool.New(context.Background(), "postgres://localhost:1/none") // never opened
	if err != nil {
		t.Fatal(err)
	}
	defer pool.Close()
	for name, c := range map[string]struct {
		pool    *pgxpool.Pool
		options inboxpgx.Options
		want    string
	}{
		"no pool":         {nil, inboxpgx.Options{}, "pool is nil"},
		"read only":       {pool, inboxpgx.Options{TxOptions: pgx.TxOptions{AccessMode: pgx.ReadOnly}}, "read only"},
		"quoting":         {pool, inboxpgx.Options{Table: `a"b`}, "invalid table name"},
		"a schema's name": {pool, inboxpgx.Options{Table: "a b.c"}, "invalid schema"},
		"a long name":     {pool, inboxpgx.Options{Table: strings.Repeat("x", 63)}, "longer than"},
	} {
		if _, err := inboxpgx.NewRepository(c.pool, c.options); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: the error is %v, want %q in it", name, err, c.want)
		}
	}
	for _, table := range []string{"", "inbox", "shop.inbox"} {
		if _, err := inboxpgx.NewRepository(pool, inboxpgx.Options{Table: table}); err != nil {
			t.Errorf("table %q: %v", table, err)
		}
	}
}
