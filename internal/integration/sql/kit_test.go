package sql_test

import (
	"database/sql"
	"testing"

	"go.uber.org/goleak"

	"github.com/devmappa/watermill-inbox/inboxtest"
	"github.com/devmappa/watermill-inbox/internal/integration/testdb"
	inboxsql "github.com/devmappa/watermill-inbox/sql"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestRepository(t *testing.T) {
	t.Parallel()
	for name, variant := range map[string]struct {
		features inboxtest.RepositoryFeatures
		open     func(t testing.TB) *testdb.Database
		options  inboxsql.Options
	}{
		"lib-pq": {
			features: inboxtest.RepositoryFeatures{FailedStatementBreaksTransaction: true},
			open:     func(t testing.TB) *testdb.Database { return testdb.PostgreSQL(t, "postgres") },
		},
		"lib-pq, REPEATABLE READ": {
			features: inboxtest.RepositoryFeatures{FailedStatementBreaksTransaction: true, WaitingCopyFails: true},
			open:     func(t testing.TB) *testdb.Database { return testdb.PostgreSQL(t, "postgres") },
			options:  inboxsql.Options{TxOptions: &sql.TxOptions{Isolation: sql.LevelRepeatableRead}},
		},
		"lib-pq, SERIALIZABLE": {
			features: inboxtest.RepositoryFeatures{FailedStatementBreaksTransaction: true, WaitingCopyFails: true},
			open:     func(t testing.TB) *testdb.Database { return testdb.PostgreSQL(t, "postgres") },
			options:  inboxsql.Options{TxOptions: &sql.TxOptions{Isolation: sql.LevelSerializable}},
		},
		"lib-pq, fused": {
			features: inboxtest.RepositoryFeatures{FailedStatementBreaksTransaction: true},
			open:     testdb.PostgreSQLFused,
		},
		"lib-pq, fused, REPEATABLE READ": {
			features: inboxtest.RepositoryFeatures{FailedStatementBreaksTransaction: true, WaitingCopyFails: true},
			open:     testdb.PostgreSQLFused,
			options:  inboxsql.Options{TxOptions: &sql.TxOptions{Isolation: sql.LevelRepeatableRead}},
		},
		"pgx": {
			features: inboxtest.RepositoryFeatures{FailedStatementBreaksTransaction: true},
			open:     func(t testing.TB) *testdb.Database { return testdb.PostgreSQL(t, "pgx") },
		},
		"SQLite": {
			features: inboxtest.RepositoryFeatures{OneWriter: true},
			open:     testdb.SQLite,
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			inboxtest.TestRepository(t, variant.features, func(t *testing.T) inboxtest.RepositorySubject {
				db := variant.open(t)
				db.SetMaxOpenConns(8)
				return db.Subject(t, variant.options)
			})
		})
	}
}
