package pgx_test

import (
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"go.uber.org/goleak"

	"github.com/devmappa/watermill-inbox/inboxtest"
	inboxpgx "github.com/devmappa/watermill-inbox/pgx"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestRepository(t *testing.T) {
	t.Parallel()
	for name, variant := range map[string]struct {
		waitingCopyFails bool
		options          inboxpgx.Options
		mode             pgx.QueryExecMode
	}{
		"default":         {},
		"REPEATABLE READ": {waitingCopyFails: true, options: inboxpgx.Options{TxOptions: pgx.TxOptions{IsoLevel: pgx.RepeatableRead}}},
		"SERIALIZABLE":    {waitingCopyFails: true, options: inboxpgx.Options{TxOptions: pgx.TxOptions{IsoLevel: pgx.Serializable}}},
		"exec mode":       {mode: pgx.QueryExecModeExec},
		"simple protocol": {mode: pgx.QueryExecModeSimpleProtocol},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			features := inboxtest.RepositoryFeatures{FailedStatementBreaksTransaction: true, WaitingCopyFails: variant.waitingCopyFails}
			inboxtest.TestRepository(t, features, func(t *testing.T) inboxtest.RepositorySubject {
				db := newDatabase(t, func(config *pgxpool.Config) {
					config.MaxConns = 8
					if variant.mode != 0 {
						config.ConnConfig.DefaultQueryExecMode = variant.mode
					}
				})
				return db.subject(t, variant.options)
			})
		})
	}
}
