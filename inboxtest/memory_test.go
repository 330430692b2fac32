package inboxtest_test

import (
	"context"
	"testing"
	"time"

	"go.uber.org/goleak"

	inbox "github.com/devmappa/watermill-inbox"
	"github.com/devmappa/watermill-inbox/inboxtest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestMemoryRepository(t *testing.T) {
	t.Parallel()
	inboxtest.TestRepository(t, inboxtest.RepositoryFeatures{}, memorySubject)
}

func memorySubject(*testing.T) inboxtest.RepositorySubject {
	repository := inboxtest.NewMemoryRepository()
	return inboxtest.RepositorySubject{
		Repository: repository,
		Write:      repository.Write,
		Effects:    func(context.Context) ([]string, error) { return repository.Effects(), nil },
		HasTransaction: func(ctx context.Context) bool {
			_, ok := inbox.TransactionFromContext[inbox.Transaction](ctx)
			return ok
		},
		Age: func(_ context.Context, key inbox.Key, by time.Duration) error {
			repository.Age(key, by)
			return nil
		},
		End: func(ctx context.Context) error {
			transaction, _ := inbox.TransactionFromContext[inbox.Transaction](ctx)
			return transaction.Commit(ctx)
		},
		Abandon: func(ctx context.Context) error {
			transaction, _ := inbox.TransactionFromContext[inbox.Transaction](ctx)
			return transaction.Rollback()
		},
	}
}
