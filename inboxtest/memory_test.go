package inboxtest_test

import (
	"context"
	"slices"
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

func TestMemoryRepositoryZeroValue(t *testing.T) {
	t.Parallel()
	ctx, key := context.Background(), inbox.Key{Consumer: "c", MessageID: "1"}
	var repository inboxtest.MemoryRepository
	found := []inbox.Record{{Key: key}}
	repository.Age(key, time.Hour)
	if _, err := repository.MarkSent(ctx, found); err != nil {
		t.Error(err)
	}
	if deleted, err := repository.DeleteRecords(ctx, found); deleted != 0 || err != nil {
		t.Errorf("deleted %d, %v", deleted, err)
	}
	if statistics, err := repository.Statistics(ctx, inbox.AllConsumers()); len(statistics.Consumers) != 0 || err != nil {
		t.Errorf("statistics %v, %v", statistics, err)
	}
	transaction, record, err := repository.Claim(ctx, inbox.ClaimParams{Key: key})
	if record != nil || err != nil {
		t.Fatalf("record %v, error %v, want the claim", record, err)
	}
	if err := repository.Write(inbox.ContextWithTransaction(ctx, transaction), "effect"); err != nil {
		t.Error(err)
	}
	if err := transaction.Commit(ctx); err != nil {
		t.Fatal(err)
	}
	if transaction, record, err = repository.Claim(ctx, inbox.ClaimParams{Key: key}); transaction != nil || record == nil || err != nil {
		t.Fatalf("record %v, error %v, want the record", record, err)
	}
	if effects := repository.Effects(); !slices.Equal(effects, []string{"effect"}) {
		t.Errorf("effects %q", effects)
	}
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
		End:     func(ctx context.Context) error { return repository.EndTransaction(ctx, true) },
		Abandon: func(ctx context.Context) error { return repository.EndTransaction(ctx, false) },
	}
}
